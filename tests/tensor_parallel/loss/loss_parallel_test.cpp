#include "tessera/tensor_parallel/loss_parallel.h"

#include <cmath>

#include "testing/distributed.h"
#include "testing/environment.h"

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
  const at::Tensor loss = at::cross_entropy_loss(leaf, targets);
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
  RunOnMesh({ranks}, {"tp"}, [&](Rank& rank, const DeviceMesh& mesh) {
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

TEST(LossParallel, GivesTheLossOfEachRow) {
  const at::Tensor leaf = some_logits(5, 9).requires_grad_();
  const at::Tensor targets = some_targets(5, 9);
  targets[3] = -100;
  const at::Tensor weights = at::arange(5, at::kFloat);
  cross_entropy(leaf, targets, {.reduction = Reduction::kNone}).mul(weights).sum().backward();
  const at::Tensor theirs = some_logits(5, 9).requires_grad_();
  const at::Tensor losses = at::cross_entropy_loss(theirs, targets, {}, at::Reduction::None, -100);
  losses.mul(weights).sum().backward();
  EXPECT_TRUE(leaf.grad().allclose(theirs.grad(), 1e-5, 1e-7));
}

TEST(LossParallel, IsZeroWhereAllTargetsAreIgnored) {
  const at::Tensor leaf = some_logits(3, 5).requires_grad_();
  const at::Tensor loss = cross_entropy(leaf, at::full({3}, -100, at::kLong));
  loss.backward();
  EXPECT_EQ(loss.item<float>(), 0);
  EXPECT_TRUE(leaf.grad().eq(0).all().item<bool>());
}

TEST(LossParallel, RefusesOptionsThatSayNothing) {
  const auto loss = [](const CrossEntropyOptions& options) {
    cross_entropy(some_logits(2, 3), some_targets(2, 3), options);
  };
  EXPECT_ERROR(loss({.label_smoothing = 1.5}), "label_smoothing is 1.5; it must be from 0 to 1");
  EXPECT_ERROR(loss({.z_loss = -1}), "z_loss is -1");
  EXPECT_ERROR(loss({.reduction = Reduction::kSum, .tokens = at::ones({})}), "or use kMean");
  EXPECT_ERROR(loss({.tokens = at::ones({2})}), "must be one number, but have sizes [2]");
}

TEST(LossParallel, ComparesTargetsInDebugMode) {
  const testing::DebugChecks checks("1");
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    const at::Tensor logits =
        distribute_tensor(some_logits(4, 6), rank.mesh({2}, {"tp"}), {Shard{1}}).tensor();
    cross_entropy(logits, some_targets(4, 6), {});
    cross_entropy(logits, (some_targets(4, 6) + rank.rank()).remainder(6), {});
  });
  EXPECT_CONTAINS(errors, "cross_entropy of logits sharded over the vocabulary: the targets",
                  "first at [0]: 2 on rank 0 and 3 on rank 1", "the same batch");
}

}  // namespace
}  // namespace tessera::tensor_parallel
