// The mean of the loss over all tokens that count, where ranks and micro-batches have differently
// many of them.

#include <ATen/ops/mse_loss.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "testing/distributed.h"

namespace tessera::fsdp {
namespace {

using tensor_parallel::cross_entropy;

constexpr std::int64_t kLossRows = 12;
constexpr std::int64_t kLossFeatures = 5;

/// A head of 7 classes, of the same weights on all ranks; of shards where a mesh is given.
struct LossHead : nn::Linear {
  LossHead() : nn::Linear(kLossFeatures, 7) { nn::init_weights(*this, 3); }
  explicit LossHead(const DeviceMesh& mesh) : LossHead() { fully_shard(*this, mesh); }
};

at::Tensor LossInputs() {
  return testing::uniform_values({kLossRows, kLossFeatures}, 0.7);
}

/// Only one of the first six rows counts; all later ones do.
at::Tensor LossTargets() {
  const at::Tensor targets = at::arange(kLossRows, at::kLong).remainder(7);
  targets.narrow(0, 1, 5).fill_(-100);
  return targets;
}

at::Tensor LossGradientOfOneRank() {
  LossHead head;
  cross_entropy(head(LossInputs()), LossTargets()).backward();
  return head.weight->grad();
}

class LossMean : public ::testing::TestWithParam<int> {};  // how many micro-batches

TEST_P(LossMean, IsOverTheTokensOfAllRanks) {
  const at::Tensor expected = LossGradientOfOneRank();
  const int count = GetParam();
  RunOnMesh({3}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    LossHead head(mesh);
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

// Ranks have 6, 6 and 4 rows; some rows have no target.
TEST(LossMean, OverAMeshIsOverTheTokensOfAllItsRanks) {
  constexpr std::int64_t kRows = 16;
  const at::Tensor x = testing::uniform_values({kRows, kLossFeatures}, 0.7);
  const at::Tensor targets = at::arange(kRows, at::kLong).remainder(7);
  for (const int ignored : {0, 3}) {
    targets.narrow(0, 0, ignored).fill_(-100);
    LossHead alone;
    const at::Tensor expected = cross_entropy(alone(x), targets);
    expected.backward();
    RunOnMesh({3}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
      LossHead head(mesh);
      const std::int64_t first = 6 * rank.rank();
      const std::int64_t rows = std::min<std::int64_t>(6, kRows - first);
      const at::Tensor loss = cross_entropy(head(x.narrow(0, first, rows)),
                                            targets.narrow(0, first, rows), {.over = mesh});
      loss.backward();
      const at::Tensor sum = loss.detach().clone();
      mesh.group().all_reduce(sum, ReduceOp::kSum)->wait();
      EXPECT_NEAR(sum.item<double>() / 3, expected.item<double>(), 1e-5);
      EXPECT_TRUE(testing::full_tensor(head.slot("weight")->persistent().grad())
                      .allclose(alone.weight->grad(), 1e-4, 1e-6));
    });
  }
  RunRanks(1, [&](Rank& rank) {
    EXPECT_ERROR(
        cross_entropy(x, targets, {.tokens = at::ones({}), .over = rank.mesh({1}, {"dp"})}),
        ".tokens");
  });
}

TEST(LossMean, RefusesTheMeanOfOneRankWhereOthersShareTheBatch) {
  RunRanks(2, [](Rank& rank) {
    LossHead head;
    const at::Tensor targets = LossTargets().narrow(0, rank.rank() * 6, 6);
    const at::Tensor inputs = LossInputs().narrow(0, rank.rank() * 6, 6);
    EXPECT_EQ(cross_entropy(head(inputs), targets).dim(), 0);
    fully_shard(head, rank.mesh({2}, {"dp"}));
    const at::Tensor logits = head(inputs);
    if (rank.rank() == 0) {
      EXPECT_ERROR(cross_entropy(logits, targets),
                   "5 of 6 targets are ignored, and 2 data-parallel", "pass {.over = mesh}",
                   "{.tokens = tokens_per_rank(targets, mesh)}");
    }
    EXPECT_EQ(cross_entropy(logits, targets, {.reduction = tensor_parallel::Reduction::kSum}).dim(),
              0);
    const c10::NoGradGuard evaluation;
    EXPECT_EQ(cross_entropy(head(inputs), targets).dim(), 0);
  });
}

TEST(LossMean, WorksWithoutAnyToken) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    LossHead head(mesh);
    const at::Tensor targets = at::full({kLossRows}, -100, at::kLong);
    const at::Tensor tokens = tensor_parallel::tokens_per_rank(targets, mesh);
    EXPECT_EQ(cross_entropy(head(LossInputs()), targets, {.tokens = tokens}).item<float>(), 0);
  });
}

namespace uneven {

constexpr std::int64_t kUnevenRows = 16;

at::Tensor inputs() {
  return testing::uniform_values({kUnevenRows, kLossFeatures}, 0.7);
}

/// The largest weighs most, so that a mean of means is another number.
at::Tensor loss_of(const at::Tensor& results, const at::Tensor& x) {
  return (results.sum(1) * x.sum(1)).square().mean();
}

/// As torch.chunk has 16 rows on 3 ranks: 6, 6 and 4.
struct Part {
  std::int64_t first, rows;
};
Part part_of(const Rank& rank) {
  const std::int64_t chunk = (kUnevenRows + rank.size() - 1) / rank.size();
  const std::int64_t first = std::min(rank.rank() * chunk, kUnevenRows);
  return {first, std::min(chunk, kUnevenRows - first)};
}

at::Tensor own_loss(nn::Linear& head, const Rank& rank) {
  const auto [first, rows] = part_of(rank);
  const at::Tensor x = inputs().narrow(0, first, rows);
  return loss_of(head(x), x);
}

/// Counts what is said of rows on this thread.
class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("differently many rows") != std::string::npos) {
      heard.push_back(warning.msg());
    }
  }
  std::vector<std::string> heard;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

}  // namespace uneven

TEST(LossOfUnevenRows, IsTheMeanOfAllWithAWeight) {
  LossHead alone;
  const at::Tensor expected = uneven::loss_of(alone(uneven::inputs()), uneven::inputs());
  expected.backward();
  for (const std::vector<std::int64_t>& sizes :
       std::vector<std::vector<std::int64_t>>{{1, 3}, {3, 1}, {2, 3}, {1, 1}}) {
    RunOnMesh(sizes, {"replicate", "shard"}, [&](Rank& rank, const DeviceMesh& mesh) {
      LossHead head(mesh);
      const double weight = mean_weight(uneven::part_of(rank).rows, mesh);
      const at::Tensor loss = uneven::own_loss(head, rank) * weight;
      loss.backward();
      const at::Tensor sum = loss.detach().clone();
      if (mesh.size() > 1) {
        mesh.group_of_all_ranks().all_reduce(sum, ReduceOp::kSum)->wait();
      }
      EXPECT_NEAR(sum.item<double>() / rank.size(), expected.item<double>(), 1e-5);
      EXPECT_TRUE(testing::full_tensor(head.slot("weight")->persistent().grad())
                      .allclose(alone.weight->grad(), 1e-4, 1e-5));
    });
  }
}

// libtorch's mean of no rows is NaN, also when it is weighed with 0.
TEST(LossOfUnevenRows, HasAZeroForARankWithoutRows) {
  LossHead alone;
  at::mse_loss(alone(LossInputs()), at::zeros({kLossRows, 7})).backward();
  RunOnMesh({2}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    LossHead head(mesh);
    const at::Tensor x = LossInputs().narrow(0, 0, rank.rank() == 0 ? kLossRows : 0);
    const at::Tensor y = head(x);
    const at::Tensor mean = x.size(0) > 0 ? at::mse_loss(y, at::zeros_like(y)) : y.sum();
    (mean * mean_weight(x.size(0), mesh)).backward();
    EXPECT_TRUE(testing::full_tensor(head.slot("weight")->persistent().grad())
                    .allclose(alone.weight->grad(), 1e-4, 1e-6));
  });
}

TEST(LossOfUnevenRows, IsWarnedOfOnceWhereNothingWasSaid) {
  RunRanks(3, [](Rank& rank) {
    const uneven::Warnings warnings;
    LossHead head(rank.mesh({3}, {"dp"}));
    for (int step = 0; step < 4; ++step) {
      uneven::own_loss(head, rank).backward();
    }
    ASSERT_EQ(warnings.heard.size(), 1);
    EXPECT_CONTAINS(warnings.heard[0], "the root unit", "4 to 6", "fsdp::mean_weight");
  });
}

TEST(LossOfUnevenRows, IsNotWarnedOfWhereItWasWeighedOrRowsAreEven) {
  RunOnMesh({3}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const uneven::Warnings warnings;
    LossHead even(mesh);
    even(uneven::inputs()).sum().backward();
    even(uneven::inputs()).sum().backward();
    LossHead divided(mesh);
    set_gradient_divide_factor(divided, 16);
    uneven::own_loss(divided, rank).backward();
    uneven::own_loss(divided, rank).backward();
    LossHead head(mesh);
    for (int step = 0; step < 2; ++step) {
      (uneven::own_loss(head, rank) * mean_weight(uneven::part_of(rank).rows, mesh)).backward();
    }
    EXPECT_TRUE(warnings.heard.empty());
  });
}

TEST(MeanWeight, RefusesRowsThatNoRankHas) {
  RunOnMesh({2}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    EXPECT_ERROR(mean_weight(0, mesh), "mean_weight: 0 rows on this rank and 0 on all");
    EXPECT_ERROR(mean_weight(rank.rank() == 0 ? 5 : -1, mesh), "mean_weight");
    EXPECT_EQ(mean_weight(rank.rank() == 0 ? 3 : 0, mesh), rank.rank() == 0 ? 2 : 0);
  });
}

// Every rank computes the whole loss, and its backward has the gradient that comes through its own
// rows: a sum, where a mean over ranks is the default.
TEST(LossOfGatheredFeatures, HasTheGradientOfOneRankWithADivideFactorOfOne) {
  const auto loss_of_pairs = [](const at::Tensor& features) {
    return features.mm(features.t()).square().mean();
  };
  LossHead alone;
  loss_of_pairs(alone(LossInputs())).backward();
  RunOnMesh({3}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    LossHead head(mesh);
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
