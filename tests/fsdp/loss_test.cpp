// Tests the mean of a loss over all tokens with a target, with different numbers of tokens per rank
// and micro-batch; penalties on sharded parameters; NaN or infinite gradients.

#include <limits>

#include "fsdp/training/training.h"
#include "tessera/nn/initialization.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/optimizer.h"
#include "tessera/tensor_parallel/loss_parallel.h"

namespace tessera::fsdp::losses {

using tensor_parallel::cross_entropy;

constexpr std::int64_t kLossRows = 12, kFeatures = 5;

struct LossHead : nn::Linear {
  LossHead() : nn::Linear(kFeatures, 7) { nn::init_weights(*this, 3); }
  explicit LossHead(const DeviceMesh& mesh) : LossHead() { fully_shard(*this, mesh); }
};

at::Tensor inputs(std::int64_t rows = kLossRows) {
  return uniform_values({rows, kFeatures}, 0.7);
}

/// Rows 1 to 5 have the target -100, which the loss ignores.
at::Tensor targets_of_rows() {
  const at::Tensor targets = at::arange(kLossRows, at::kLong).remainder(7);
  targets.narrow(0, 1, 5).fill_(-100);
  return targets;
}

void expect_gradient(const LossHead& head, const LossHead& alone) {
  EXPECT_TRUE(full_grad(head).allclose(alone.weight->grad(), 1e-4, 1e-5));
}

double mean_over_ranks(const at::Tensor& loss, const DeviceMesh& mesh) {
  const at::Tensor sum = loss.detach().clone();
  if (mesh.size() > 1) {
    mesh.group_of_all_ranks().all_reduce(sum, ReduceOp::kSum)->wait();
  }
  return sum.item<double>() / static_cast<double>(mesh.size());
}

TEST(LossMean, CountsTheTokensOfAllRanksAndMicroBatches) {
  LossHead alone;
  cross_entropy(alone(inputs()), targets_of_rows()).backward();
  RunOnMesh({3}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    for (const int count : {1, 2, 4}) {
      LossHead head(mesh);
      const std::int64_t rows = kLossRows / 3, micro = rows / count;
      const at::Tensor x = inputs().narrow(0, rank.rank() * rows, rows);
      const at::Tensor targets = targets_of_rows().narrow(0, rank.rank() * rows, rows);
      const at::Tensor tokens = tensor_parallel::tokens_per_rank(targets, mesh);
      for (int i = 0; i < count; ++i) {
        cross_entropy(head(x.narrow(0, i * micro, micro)), targets.narrow(0, i * micro, micro),
                      {.tokens = tokens})
            .backward();
      }
      expect_gradient(head, alone);
    }
  });
}

// 3 ranks have 6, 6 and 4 of 16 rows. The loss ignores the first `ignored` rows (target -100).
TEST(LossMean, OverAMeshCountsTheTokensOfAllRanks) {
  constexpr std::int64_t kUneven = 16;
  const at::Tensor x = inputs(kUneven);
  const at::Tensor targets = at::arange(kUneven, at::kLong).remainder(7);
  for (const int ignored : {0, 3}) {
    targets.narrow(0, 0, ignored).fill_(-100);
    LossHead alone;
    const at::Tensor expected = cross_entropy(alone(x), targets);
    expected.backward();
    RunOnMesh({3}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
      LossHead head(mesh);
      const std::int64_t first = 6 * rank.rank();
      const std::int64_t rows = std::min<std::int64_t>(6, kUneven - first);
      const at::Tensor loss = cross_entropy(head(x.narrow(0, first, rows)),
                                            targets.narrow(0, first, rows), {.over = mesh});
      loss.backward();
      EXPECT_NEAR(mean_over_ranks(loss, mesh), expected.item<double>(), 1e-5);
      expect_gradient(head, alone);
    });
  }
  RunRanks(1, [&](Rank& rank) {
    EXPECT_ERROR(
        cross_entropy(x, targets, {.tokens = at::ones({}), .over = rank.mesh({1}, {"dp"})}),
        ".tokens");
  });
}

TEST_ON_RANKS(LossMean, OverOneRankIsRefusedUnderDataParallelism, 2) {
  LossHead head;
  const at::Tensor targets = targets_of_rows().narrow(0, rank.rank() * 6, 6);
  const at::Tensor x = inputs().narrow(0, rank.rank() * 6, 6);
  EXPECT_EQ(cross_entropy(head(x), targets).dim(), 0);
  fully_shard(head, rank.mesh({2}, {"dp"}));
  const at::Tensor logits = head(x);
  if (rank.rank() == 0) {
    EXPECT_ERROR(cross_entropy(logits, targets), "5 of 6", "2 data-parallel", ".over",
                 "tokens_per_rank");
  }
  EXPECT_EQ(cross_entropy(logits, targets, {.reduction = at::Reduction::Sum}).dim(), 0);
  const c10::NoGradGuard evaluation;
  EXPECT_EQ(cross_entropy(head(x), targets).dim(), 0);
}

struct UnevenRows {
  static constexpr std::int64_t kAll = 16;

  explicit UnevenRows(const Rank& rank) {
    const std::int64_t chunk = (kAll + rank.size() - 1) / rank.size();
    const std::int64_t first = std::min(rank.rank() * chunk, kAll);
    count = std::min(chunk, kAll - first);
    x = inputs(kAll).narrow(0, first, count);
  }
  /// Later rows have larger losses, so the mean of the ranks' mean losses is not the global mean.
  static at::Tensor loss(nn::Linear& head, const at::Tensor& x) {
    return (head(x).sum(1) * x.sum(1)).square().mean();
  }
  at::Tensor loss(nn::Linear& head) const { return loss(head, x); }

  std::int64_t count = 0;
  at::Tensor x;
};

TEST(LossOfUnevenRows, IsTheMeanOfAllRowsWithMeanWeight) {
  LossHead alone;
  const at::Tensor expected = UnevenRows::loss(alone, inputs(UnevenRows::kAll));
  expected.backward();
  for (const std::vector<std::int64_t>& sizes :
       std::vector<std::vector<std::int64_t>>{{1, 3}, {3, 1}, {2, 3}, {1, 1}}) {
    RunOnMesh(sizes, {"replicate", "shard"}, [&](Rank& rank, const DeviceMesh& mesh) {
      LossHead head(mesh);
      const UnevenRows rows(rank);
      const at::Tensor loss = rows.loss(head) * mean_weight(rows.count, mesh);
      loss.backward();
      EXPECT_NEAR(mean_over_ranks(loss, mesh), expected.item<double>(), 1e-5);
      expect_gradient(head, alone);
    });
  }
}

// Only `head` must cause a warning: for `head`, the ranks have unequal numbers of rows, and the
// program neither weights the loss nor sets the gradient divide factor.
TEST(LossOfUnevenRows, WarnsOnceIfUnweighted) {
  RunOnMesh({3}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const Warnings warnings("different numbers of rows");
    const UnevenRows rows(rank);
    LossHead even(mesh), divided(mesh), head(mesh);
    set_gradient_divide_factor(divided, 16);
    for (int step = 0; step < 2; ++step) {
      even(inputs()).sum().backward();
      rows.loss(divided).backward();
    }
    EXPECT_TRUE(warnings.messages().empty());
    for (int step = 0; step < 4; ++step) {
      rows.loss(head).backward();
    }
    ASSERT_EQ(warnings.messages().size(), 1);
    EXPECT_CONTAINS(warnings.messages()[0], "the root unit", "4 to 6", "mean_weight");
  });
  // Runs in new threads, because a thread that has called mean_weight() gets no warning.
  RunOnMesh({3}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const Warnings warnings("different numbers of rows");
    const UnevenRows rows(rank);
    LossHead weighed(mesh);
    for (int step = 0; step < 2; ++step) {
      (rows.loss(weighed) * mean_weight(rows.count, mesh)).backward();
    }
    EXPECT_TRUE(warnings.messages().empty());
  });
}

TEST_ON_MESH(MeanWeight, RefusesAnEmptyBatchAndNegativeCounts, {2}, {"dp"}) {
  EXPECT_ERROR(mean_weight(0, mesh), "mean_weight", "0 rows");
  EXPECT_ERROR(mean_weight(rank.rank() == 0 ? 5 : -1, mesh), "mean_weight");
  EXPECT_EQ(mean_weight(rank.rank() == 0 ? 3 : 0, mesh), rank.rank() == 0 ? 2 : 0);
}

at::Tensor penalty_of(const SmallModel& model) {
  return model.head->weight->square().sum() + model.blocks[0]->up->bias->abs().sum();
}

TEST(Penalty, OnWholeParametersHasTheGradientsOfOneRank) {
  Filled<SmallModel> alone(kDim, 5, 3);
  const at::Tensor loss_alone = fsdp::loss_of(alone, batch(kDim, 0), 0, kRows);
  const at::Tensor penalty_alone = penalty_of(alone);
  (loss_alone + 0.5 * penalty_alone + loss_alone * penalty_alone).backward();
  for (const int ranks : {1, 2, 3}) {
    RunArranged({"", {ranks}, {"dp"}}, {kDim, 5, 3}, [&](Rank& rank, ShardedModel& model) {
      const at::Tensor loss = local_loss(model, rank);
      const DistributedTensor penalty(penalty_of(model));
      (loss + 0.5 * penalty.full_tensor() +
       loss * penalty.full_tensor(Placements{Partial{ReduceOp::kAvg}}))
          .backward();
      expect_gradients(model, gradients_of(alone));
    });
  }
}

TEST_SHARDED(Penalty, OnShardsCannotBeAddedToALocalLoss, 2) {
  const at::Tensor loss = local_loss(model, rank);
  const at::Tensor penalty = penalty_of(model);
  EXPECT_ERROR(loss + 0.5 * penalty, "full_tensor()");
  EXPECT_ERROR(penalty * loss, "full_tensor(Placements{Partial{ReduceOp::kAvg}})");
  EXPECT_ERROR(penalty - loss.detach(), "differs from rank 0", "ranks 1");
  EXPECT_TRUE(tessera::is_distributed(penalty - at::scalar_tensor(2)));
}

struct NonfiniteCase {
  const char* name;
  std::vector<std::int64_t> sizes;
  std::function<void(Rank&, const DeviceMesh&)> step;
  std::vector<std::string_view> words;
};

TEST(NonfiniteGradient, IsReportedWithRanksAndParameterNames) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const optim::NormOptions throws{.error_if_nonfinite = true};
  const auto spoilt = [&](double factor) {
    return [&, factor](Rank& rank, const DeviceMesh& mesh) {
      ShardedModel model(mesh);
      local_loss(model, rank).mul(rank.rank() == 1 ? factor : 1.0).backward();
      optim::clip_grad_norm_(optim::slots_of(model), 1.0, throws);
    };
  };
  const std::vector<std::string_view> rank_1{"rank 1", "not finite", "'block0.down.bias'"};
  const std::vector<NonfiniteCase> cases{
      {"shards", {1, 3}, spoilt(kNan), rank_1},
      {"hsdp", {2, 2}, spoilt(kInfinity), rank_1},
      {"replicas", {4, 1}, spoilt(kNan), rank_1},
      {"all ranks",
       {1, 2},
       [&](Rank& rank, const DeviceMesh& mesh) {
         ShardedModel model(mesh);
         local_loss(model, rank).mul(kNan).backward();
         optim::grad_norm(optim::slots_of(model), throws);
       },
       {"ranks 0, 1", "not finite"}},
      {"an earlier micro-batch",
       {1, 2},
       [&](Rank& rank, const DeviceMesh& mesh) {
         ShardedModel model(mesh);
         set_requires_gradient_sync(model, false);
         local_loss(model, rank).mul(rank.rank() == 0 ? kNan : 1.0).backward();
         set_requires_gradient_sync(model, true);
         local_loss(model, rank).backward();
         optim::grad_norm(optim::slots_of(model), throws);
       },
       {"rank 0", "not finite"}},
      // Without small parameters, the message can only name the ranks whose gradient shards contain
      // NaN or infinite values.
      {"a large parameter",
       {1, 2},
       [&](Rank& rank, const DeviceMesh& mesh) {
         Filled<nn::Linear> large(90, 100, {.bias = false});
         fully_shard(large, mesh);
         const at::Tensor loss = large(uniform_values({2, 90}, 1)).sum();
         loss.mul(rank.rank() == 1 ? kNan : 1.0).backward();
         optim::grad_norm(optim::slots_of(large), throws);
       },
       {"'weight'", "ranks 0, 1"}}};
  for (const NonfiniteCase& c : cases) {
    SCOPED_TRACE(c.name);
    const auto errors = ErrorsOfRanks(testing::ranks_of(c.sizes), [&](Rank& rank) {
      c.step(rank, rank.mesh(c.sizes, {"replicate", "shard"}));
    });
    EXPECT_TRUE(testing::Contains(errors, c.words));
  }
  RunSharded(2, [](Rank& rank, ShardedModel& model) {
    local_loss(model, rank).backward();
    EXPECT_EQ(optim::detail::describe_nonfinite(optim::slots_of(model)), "");
  });
}

}  // namespace tessera::fsdp::losses
