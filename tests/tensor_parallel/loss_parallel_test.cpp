#include "tessera/tensor_parallel/loss_parallel.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/policy.h"
#include "testing/ranks.h"

namespace tessera::tensor_parallel {
namespace {

at::Tensor some_logits(std::int64_t tokens, std::int64_t vocabulary) {
  return at::arange(tokens * vocabulary, at::kFloat)
      .mul(0.37)
      .sin()
      .mul(4)
      .view({tokens, vocabulary});
}

at::Tensor some_targets(std::int64_t tokens, std::int64_t vocabulary) {
  return at::arange(tokens, at::kLong).mul(7).add(2).remainder(vocabulary);
}

struct Expected {
  at::Tensor loss, gradient;
};

/// libtorch's, in fp32 on one rank.
Expected reference(const at::Tensor& logits, const at::Tensor& targets) {
  const at::Tensor leaf = logits.detach().to(at::kFloat).requires_grad_();
  const at::Tensor loss = at::cross_entropy_loss(leaf, targets, {}, at::Reduction::Mean, -100);
  loss.backward();
  return {loss.detach(), leaf.grad()};
}

struct Case {
  int ranks;
  std::int64_t tokens, vocabulary;
};

class LossParallel : public ::testing::TestWithParam<Case> {};

TEST_P(LossParallel, EqualsTheLossOfOneRank) {
  const auto [ranks, tokens, vocabulary] = GetParam();
  const at::Tensor logits = some_logits(tokens, vocabulary);
  const at::Tensor targets = some_targets(tokens, vocabulary);
  targets[1] = -100;
  const Expected expected = reference(logits, targets);
  RunRanks(ranks, [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({rank.size()}, {"tp"});
    at::Tensor sharded =
        distribute_tensor(logits, mesh, {Shard{1}}).tensor().detach().requires_grad_();
    const StrictScope strict;
    const comm::TrafficTable before = rank.world()->traffic().table();
    const at::Tensor loss = cross_entropy(sharded, targets);
    const comm::TrafficTable forward = rank.world()->traffic().since(before);
    loss.mul(2).backward();
    const comm::TrafficTable all = rank.world()->traffic().since(before);

    EXPECT_TRUE(loss.allclose(expected.loss, 1e-6, 1e-6));
    const DistributedTensor gradient(sharded.grad());
    EXPECT_EQ(gradient.placements(), Placements{Shard{1}});
    EXPECT_TRUE(gradient.full_tensor().allclose(expected.gradient.mul(2), 1e-5, 1e-7));
    EXPECT_EQ(comm::total(forward).calls, rank.size() == 1 ? 0 : 2);
    EXPECT_EQ(comm::total(all).calls, comm::total(forward).calls);
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, LossParallel,
                         ::testing::Values(Case{1, 5, 11}, Case{2, 6, 8}, Case{4, 7, 1009},
                                           Case{4, 3, 5},        // the last rank's shard is empty
                                           Case{3, 300, 501}));  // several blocks of rows

TEST(LossParallel, EqualsLibtorchOnPlainLogits) {
  const at::Tensor logits = some_logits(9, 13);
  const at::Tensor targets = some_targets(9, 13);
  const Expected expected = reference(logits, targets);
  const at::Tensor leaf = logits.clone().requires_grad_();
  const at::Tensor loss = cross_entropy(leaf, targets);
  loss.backward();
  EXPECT_TRUE(loss.allclose(expected.loss));
  EXPECT_TRUE(leaf.grad().allclose(expected.gradient, 1e-5, 1e-7));
}

TEST(LossParallel, ComputesInFp32FromBfloat16) {
  const at::Tensor logits = some_logits(6, 40).to(at::kBFloat16);
  const at::Tensor targets = some_targets(6, 40);
  const Expected expected = reference(logits, targets);
  RunRanks(2, [&](Rank& rank) {
    const at::Tensor sharded = distribute_tensor(logits, rank.mesh({2}, {"tp"}), {Shard{1}})
                                   .tensor()
                                   .detach()
                                   .requires_grad_();
    const at::Tensor loss = cross_entropy(sharded, targets);
    loss.backward();
    EXPECT_EQ(loss.scalar_type(), at::kFloat);
    EXPECT_TRUE(loss.allclose(expected.loss, 1e-6, 1e-6));
    EXPECT_EQ(sharded.grad().scalar_type(), at::kBFloat16);
    EXPECT_TRUE(DistributedTensor(sharded.grad())
                    .full_tensor()
                    .to(at::kFloat)
                    .allclose(expected.gradient, 1e-2, 1e-6));
  });
}

TEST(LossParallel, SurvivesLogitsThatOverflowExp) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor logits = at::full({2, 4}, 1e4);
    const at::Tensor sharded =
        distribute_tensor(logits, rank.mesh({2}, {"tp"}), {Shard{1}}).tensor();
    EXPECT_NEAR(cross_entropy(sharded, some_targets(2, 4)).item<double>(), std::log(4.0), 1e-6);
  });
}

TEST(LossParallel, TakesReplicatedLogits) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor logits = some_logits(4, 6);
    const at::Tensor whole = distribute_tensor(logits, rank.mesh({2}, {"tp"}), {Replicate{}})
                                 .tensor()
                                 .detach()
                                 .requires_grad_();
    const at::Tensor loss = cross_entropy(whole, some_targets(4, 6));
    loss.backward();
    const Expected expected = reference(logits, some_targets(4, 6));
    EXPECT_TRUE(loss.allclose(expected.loss));
    EXPECT_TRUE(local_tensor(whole.grad()).allclose(expected.gradient, 1e-5, 1e-7));
  });
}

TEST(LossParallel, RefusesTargetsOutsideTheVocabulary) {
  EXPECT_THROW(cross_entropy(some_logits(2, 3), at::full({2}, 3, at::kLong)), Error);
  EXPECT_THROW(cross_entropy(some_logits(2, 3), at::full({2}, -1, at::kLong)), Error);
}

TEST(LossParallel, RefusesShapesThatDoNotMatch) {
  EXPECT_THROW(cross_entropy(some_logits(2, 3), some_targets(3, 3)), Error);
  EXPECT_THROW(cross_entropy(some_logits(2, 3), at::full({2}, 1.0)), Error);
}

TEST(LossParallel, RefusesLogitsSplitOverTheTokens) {
  RunRanks(2, [](Rank& rank) {
    const at::Tensor sharded =
        distribute_tensor(some_logits(4, 6), rank.mesh({2}, {"tp"}), {Shard{0}}).tensor();
    EXPECT_THROW(cross_entropy(sharded, some_targets(4, 6)), Error);
  });
}

}  // namespace
}  // namespace tessera::tensor_parallel
