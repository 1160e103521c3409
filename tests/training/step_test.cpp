// A step of training, held against one rank that computes it by libtorch's calls alone.
#include "tessera/training/step.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "mlp_run.h"
#include "tessera/optim/clip_grad.h"
#include "testing/errors.h"

namespace tessera::testing {
namespace {

using training::StepOptions;
using training::StepResult;

constexpr std::int64_t kSteps = 4;

struct Outcome {
  std::vector<double> losses, norms;
  at::Tensor weights;
};

/// Without training::step().
Outcome on_one_rank() {
  Outcome outcome;
  Mlp model;
  nn::init_weights(model, /*seed=*/3);
  optim::AdamW optimizer(model, {.lr = 1e-2});
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const auto [x, y] = rows_of(step, 0, kBatch);
    const at::Tensor loss = model(x, y);
    loss.backward();
    outcome.norms.push_back(optim::clip_grad_norm_(optimizer.parameters(), 0.1).item<double>());
    outcome.losses.push_back(loss.item<double>());
    optimizer.step();
    optimizer.zero_grad();
  }
  std::vector<at::Tensor> all;
  for (const auto& [name, slot] : model.named_slots()) {
    all.push_back(slot->get().detach().flatten());
  }
  outcome.weights = at::cat(all);
  return outcome;
}

void expect_one_ranks_steps(MlpRun& run, const StepOptions& options) {
  const Outcome one = on_one_rank();
  for (std::int64_t i = 0; i < kSteps; ++i) {
    const auto index = static_cast<std::size_t>(i);
    const StepResult result = run.step(options);
    EXPECT_NEAR(result.loss, one.losses[index], 1e-6);
    EXPECT_NEAR(result.grad_norm, one.norms[index], 1e-6);
    EXPECT_EQ(run.state->step, i + 1);
    EXPECT_EQ(run.state->samples, (i + 1) * kBatch);
  }
  EXPECT_TRUE(run.weights().allclose(one.weights, 1e-4, 1e-6));
}

TEST(StepTest, EqualsOneRanksOnA2x2Mesh) {
  RunRanks(4, [](Rank& rank) {
    MlpRun run(rank, 2, 2);
    expect_one_ranks_steps(run, {.max_norm = 0.1});
  });
}

TEST(StepTest, MicroBatchesAddUpToTheBatch) {
  RunRanks(2, [](Rank& rank) {
    MlpRun run(rank, 2, 1);
    expect_one_ranks_steps(run, {.accumulate = 3, .max_norm = 0.1});
  });
}

TEST(StepTest, MicroBatchesThatAreReducedOnceAddUpToTheBatch) {
  RunRanks(4, [](Rank& rank) {
    MlpRun run(rank, 2, 2, {.reshard_after_forward = false});
    expect_one_ranks_steps(run, {.accumulate = 2, .sync_each_micro_batch = false, .max_norm = 0.1});
  });
}

TEST(StepTest, SumsMicroBatchesThatCountForThemselves) {
  RunRanks(2, [](Rank& rank) {
    MlpRun run(rank, 2, 1), other(rank, 2, 1);
    const double loss = run.step({.accumulate = 2}).loss;
    const StepResult summed =
        training::step(*other.state, other.mesh["dp"],
                       {.batch = kBatch, .accumulate = 2, .mean_of_micro_batches = false},
                       [&](std::int64_t i) { return other.loss(i, 2) / 2; });
    EXPECT_EQ(summed.loss, loss);
    EXPECT_TRUE(other.weights().equal(run.weights()));
  });
}

TEST(StepTest, TheScheduleSetsTheRate) {
  RunRanks(1, [](Rank& rank) {
    MlpRun run(rank, 1, 1);
    const at::Tensor before = run.weights();
    const optim::LrSchedule schedule({.warmup = 4, .steps = 8});
    EXPECT_EQ(run.step({.schedule = schedule}).lr_factor, 0.25);
    // The first update of Adam is the rate, in the gradient's direction.
    EXPECT_NEAR((run.weights() - before).abs().max().item<double>(), 1e-2 / 4, 1e-4);
    EXPECT_EQ(run.step({.schedule = schedule}).lr_factor, 0.5);
  });
}

TEST(StepTest, LeavesOutAStepWhoseScaledGradientsOverflow) {
  RunRanks(2, [](Rank& rank) {
    MlpRun run(rank, 2, 1);
    run.state->scaler = optim::GradScaler({.init_scale = std::numeric_limits<float>::max()});
    const at::Tensor before = run.weights();
    const StepResult result = run.step();
    EXPECT_TRUE(result.skipped);
    EXPECT_EQ(result.loss_scale, std::numeric_limits<float>::max());
    EXPECT_TRUE(run.weights().equal(before));
    EXPECT_EQ(run.state->step, 1);
  });
}

TEST(StepTest, ALossThatIsNotFiniteOnOneRankIsAnErrorOnAll) {
  const std::vector<std::string> errors = ErrorsOfRanks(4, [](Rank& rank) {
    MlpRun run(rank, 2, 2);
    run.step();
    const double factor =
        run.mesh.local_rank("dp") == 1 ? std::numeric_limits<double>::infinity() : 1;
    training::step(*run.state, run.mesh["dp"], {.advice_not_finite = "look at the data"},
                   [&](std::int64_t i) { return run.loss(i) * factor; });
  });
  for (const std::string& error : errors) {
    EXPECT_CONTAINS(error, "step 2: the loss is inf and the gradient norm", "parameter '",
                    "; look at the data");
  }
}

TEST(StepTest, AnErrorOfLibtorchOnOneRankNamesTheStepAndTheRank) {
  const std::vector<std::string> errors = ErrorsOfRanks(2, [](Rank& rank) {
    MlpRun run(rank, 2, 1);
    run.step();
    training::step(*run.state, run.mesh["dp"], {}, [&](std::int64_t i) {
      return rank.rank() == 1 ? at::mm(at::zeros({2, 3}), at::zeros({2, 3})) : run.loss(i);
    });
  });
  EXPECT_CONTAINS(errors[1], "step 2, outside of forward and backward, rank 1: ", "mat1 and mat2");
  EXPECT_FALSE(errors[0].empty());
}

}  // namespace
}  // namespace tessera::testing
