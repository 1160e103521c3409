// The mean of the loss over all tokens that count, where ranks and micro-batches have differently
// many of them.

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "testing/errors.h"
#include "testing/full_tensor.h"
#include "testing/ranks.h"
#include "testing/values.h"

namespace tessera::fsdp {
namespace {

using tensor_parallel::cross_entropy;

constexpr std::int64_t kLossRows = 12;
constexpr std::int64_t kLossFeatures = 5;

at::Tensor LossInputs() {
  return testing::uniform_values({kLossRows, kLossFeatures}, 0.7);
}

/// Of the first six rows one counts, of the others all.
at::Tensor LossTargets() {
  const at::Tensor targets = at::arange(kLossRows, at::kLong).remainder(7);
  targets.narrow(0, 1, 5).fill_(-100);
  return targets;
}

at::Tensor LossGradientOfOneRank() {
  nn::Linear head(kLossFeatures, 7);
  nn::init_weights(head, 3);
  cross_entropy(head(LossInputs()), LossTargets()).backward();
  return head.weight->grad();
}

class LossMean : public ::testing::TestWithParam<int> {};  // how many micro-batches

TEST_P(LossMean, IsOverTheTokensOfAllRanks) {
  const at::Tensor expected = LossGradientOfOneRank();
  const int count = GetParam();
  RunRanks(3, [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({3}, {"dp"});
    nn::Linear head(kLossFeatures, 7);
    nn::init_weights(head, 3);
    fully_shard(head, mesh);
    const std::int64_t rows = kLossRows / 3;
    const at::Tensor inputs = LossInputs().narrow(0, rank.rank() * rows, rows);
    const at::Tensor targets = LossTargets().narrow(0, rank.rank() * rows, rows);
    const at::Tensor tokens = tensor_parallel::tokens_per_rank(targets, mesh);
    for (int i = 0; i < count; ++i) {
      const std::int64_t micro = rows / count;
      cross_entropy(head(inputs.narrow(0, i * micro, micro)), targets.narrow(0, i * micro, micro),
                    {.tokens = tokens})
          .backward();
    }
    const at::Tensor gradient = head.slot("weight")->persistent().grad();
    EXPECT_TRUE(testing::full_tensor(gradient).allclose(expected, 1e-5, 1e-7));
  });
}

INSTANTIATE_TEST_SUITE_P(MicroBatches, LossMean, ::testing::Values(1, 2, 4));

TEST(LossMean, RefusesTheMeanOfOneRankWhereOthersShareTheBatch) {
  RunRanks(2, [](Rank& rank) {
    nn::Linear head(kLossFeatures, 7);
    nn::init_weights(head, 3);
    const at::Tensor targets = LossTargets().narrow(0, rank.rank() * 6, 6);
    const at::Tensor inputs = LossInputs().narrow(0, rank.rank() * 6, 6);
    EXPECT_EQ(cross_entropy(head(inputs), targets).dim(), 0);
    fully_shard(head, rank.mesh({2}, {"dp"}));
    const at::Tensor logits = head(inputs);
    if (rank.rank() == 0) {
      EXPECT_ERROR(cross_entropy(logits, targets),
                   "5 of 6 targets are ignored, and 2 data-parallel",
                   "pass {.tokens = tokens_per_rank(targets, mesh)}");
    }
    EXPECT_EQ(cross_entropy(logits, targets, {.reduction = tensor_parallel::Reduction::kSum}).dim(),
              0);
    const c10::NoGradGuard evaluation;
    EXPECT_EQ(cross_entropy(head(inputs), targets).dim(), 0);
  });
}

TEST(LossMean, IsOfNoTokensAsWell) {
  RunRanks(2, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2}, {"dp"});
    nn::Linear head(kLossFeatures, 7);
    nn::init_weights(head, 3);
    fully_shard(head, mesh);
    const at::Tensor targets = at::full({kLossRows}, -100, at::kLong);
    const at::Tensor tokens = tensor_parallel::tokens_per_rank(targets, mesh);
    EXPECT_EQ(cross_entropy(head(LossInputs()), targets, {.tokens = tokens}).item<float>(), 0);
  });
}

// Every rank computes the whole loss, and its backward has the gradient that comes through its own
// rows: a sum, where a mean over ranks is the default.
TEST(LossOfGatheredFeatures, HasTheGradientOfOneRankWithADivideFactorOfOne) {
  const auto loss_of_pairs = [](const at::Tensor& features) {
    return features.mm(features.t()).square().mean();
  };
  nn::Linear alone(kLossFeatures, 7);
  nn::init_weights(alone, 3);
  loss_of_pairs(alone(LossInputs())).backward();
  RunRanks(3, [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({3}, {"dp"});
    nn::Linear head(kLossFeatures, 7);
    nn::init_weights(head, 3);
    fully_shard(head, mesh);
    set_gradient_divide_factor(head, 1);
    const std::int64_t rows = kLossRows / 3;
    const at::Tensor inputs = LossInputs().narrow(0, rank.rank() * rows, rows);
    const auto features = DistributedTensor::from_local(head(inputs), mesh, {Shard{0}});
    loss_of_pairs(features.full_tensor()).backward();
    EXPECT_TRUE(testing::full_tensor(head.slot("weight")->persistent().grad())
                    .allclose(alone.weight->grad(), 1e-4, 1e-5));
  });
}

}  // namespace
}  // namespace tessera::fsdp
