// Training steps on meshes, compared with one rank that uses libtorch's calls alone.

#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <stdexcept>

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

/// Trains on one rank without training::step().
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

TEST(StepTest, EqualsOneRanksStepOnAMeshAndWithMicroBatches) {
  struct Row {
    std::int64_t dp, tp;
    StepOptions options;
    fsdp::Options units{};
  };
  for (const Row& row :
       {Row{2, 2, {.max_norm = 0.1}}, Row{2, 1, {.accumulate = 3, .max_norm = 0.1}},
        Row{2,
            2,
            {.accumulate = 2, .sync_each_micro_batch = false, .max_norm = 0.1},
            {.reshard_after_forward = false}}}) {
    SCOPED_TRACE(row.options.accumulate);
    RunRanks(static_cast<int>(row.dp * row.tp), [&](Rank& rank) {
      MlpRun run(rank, row.dp, row.tp, row.units);
      expect_one_ranks_steps(run, row.options);
    });
  }
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
    // The first update of Adam has the size of the learning rate.
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

TEST(StepTest, OnACpuFiguresThatAreNotFiniteLeaveParametersAndStateAsTheyWere) {
  RunRanks(2, [](Rank& rank) {
    MlpRun run(rank, 2, 1);
    run.step();
    const auto values = [&] {
      std::vector<at::Tensor> all{run.weights()};
      for (const optim::StateTensor& each : run.state->optimizer.state()) {
        all.push_back(local_tensor(each.tensor).clone().flatten());
      }
      return at::cat(all);
    };
    const at::Tensor before = values();
    EXPECT_ERROR(training::step(*run.state, run.mesh["dp"], {},
                                [&](std::int64_t i) { return run.loss(i) * std::nan(""); }),
                 "step 2: the loss is nan");
    EXPECT_TRUE(values().equal(before));
    EXPECT_EQ(run.state->step, 1);
    run.step();
    EXPECT_TRUE(run.weights().isfinite().all().item<bool>());
  });
}

TEST(StepTest, SoDoTheyWithLossScaling) {
  RunRanks(2, [](Rank& rank) {
    MlpRun run(rank, 2, 1);
    run.state->scaler = optim::GradScaler({.init_scale = 8});
    run.step();
    const at::Tensor before = run.weights();
    const double added = rank.rank() == 1 ? std::nan("") : 0;
    EXPECT_ERROR(training::step(*run.state, run.mesh["dp"], {},
                                [&](std::int64_t i) { return run.loss(i) + added; }),
                 "step 2: the loss is nan", "a mean over no samples");
    EXPECT_TRUE(run.weights().equal(before));
    run.step();
    EXPECT_FALSE(run.weights().equal(before));
  });
}

/// The optimizer updates only a part of the model; the other gradients must be cleared too.
TEST(StepTest, LeavesNoGradientsOfOthers) {
  RunRanks(1, [](Rank& rank) {
    MlpRun run(rank, 1, 1);
    optim::AdamW optimizer(*run.model->down, {.lr = 0});
    training::TrainState state{.model = *run.model, .optimizer = optimizer};
    const auto norm = [&] {
      return training::step(state, run.mesh["dp"], {}, [&](std::int64_t i) { return run.loss(i); })
          .grad_norm;
    };
    EXPECT_EQ(norm(), norm());
  });
}

TEST(StepTest, TakesTheMeshOfHsdp) {
  RunRanks(4, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2, 2}, {"replicas", "dp"});
    Mlp model;
    fsdp::fully_shard(model, mesh);
    nn::init_weights(model, /*seed=*/3);
    optim::AdamW optimizer(model, {.lr = 1e-2});
    training::TrainState state{.model = model, .optimizer = optimizer};
    const StepResult result = training::step(state, mesh, {.max_norm = 0.1}, [&](std::int64_t) {
      const auto [x, y] = rows_of(0, rank.rank() * kBatch / 4, kBatch / 4);
      return model(x, y);
    });
    EXPECT_NEAR(result.loss, on_one_rank().losses[0], 1e-6);
    EXPECT_NEAR(result.grad_norm, on_one_rank().norms[0], 1e-6);
  });
}

/// Runs a step whose loss function throws at a micro-batch, and then another step.
void expect_nothing_left(const StepOptions& options, const fsdp::Options& units) {
  RunRanks(2, [&](Rank& rank) {
    MlpRun run(rank, 2, 1, units), expected(rank, 2, 1, units);
    EXPECT_THROWN(std::runtime_error,
                  training::step(*run.state, run.mesh["dp"], options,
                                 [&](std::int64_t i) {
                                   return i == 1 ? throw std::runtime_error("bad batch")
                                                 : run.loss(i, options.accumulate);
                                 }),
                  "bad batch");
    EXPECT_EQ(run.step().grad_norm, expected.step().grad_norm);
    EXPECT_TRUE(run.weights().equal(expected.weights()));
  });
}

TEST(StepTest, ALossFunctionThatThrowsLeavesNoGradientsAndTheUnitsReducing) {
  expect_nothing_left({.batch = kBatch, .accumulate = 2}, {});
  expect_nothing_left({.batch = kBatch, .accumulate = 2, .sync_each_micro_batch = false},
                      {.reshard_after_forward = false});
}

TEST(StepTest, AModelThatIsOnNoMeshOfTheDataIsRefused) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank&, const DeviceMesh& mesh) {
    Mlp model;
    nn::init_weights(model, /*seed=*/3);
    optim::AdamW optimizer(model, {});
    training::TrainState state{.model = model, .optimizer = optimizer};
    const auto rows = rows_of(0, 0, 4);
    const auto step = [&] {
      return training::step(state, mesh["dp"], {.batch = 8},
                            [&](std::int64_t) { return model(rows.first, rows.second); });
    };
    EXPECT_ERROR(step(),
                 "step 1: none of the 4 trained parameters of a tessera::testing::Mlp is on",
                 "of 2 ranks", "fsdp::fully_shard or fsdp::replicate");
    // A tensor-parallel plan reduces nothing over dp.
    tensor_parallel::parallelize_module(model, mesh["tp"],
                                        {{"up", tensor_parallel::colwise_parallel()},
                                         {"down", tensor_parallel::rowwise_parallel()}});
    EXPECT_ERROR(step(), "of 2 ranks");
    fsdp::replicate(model, mesh["dp"]);
    EXPECT_GT(step().grad_norm, 0);
  });
}

TEST(StepTest, NamesWhatIsWrongWithTheOptionsOrTheLoss) {
  RunRanks(1, [](Rank& rank) {
    MlpRun run(rank, 1, 1);
    const auto step = [&](const StepOptions& options, const training::LossFunction& loss) {
      training::step(*run.state, run.mesh["dp"], options, loss);
    };
    const auto loss = [&](std::int64_t i) { return run.loss(i); };
    const auto returns = [&](const std::function<at::Tensor(const at::Tensor&)>& change) {
      return
          [&step, &run, change] { step({}, [&](std::int64_t i) { return change(run.loss(i)); }); };
    };
    const auto meta = [](const at::Tensor& x) { return x.to(at::kMeta); };
    expect_refusals({
        {"accumulate", [&] { step({.accumulate = 0}, loss); }, {"step 1", "accumulate is 0"}},
        {"batch", [&] { step({.batch = 0}, loss); }, {"batch 0"}},
        {"no function", [&] { step({}, nullptr); }, {"loss function is empty"}},
        {"undefined", returns([](auto&) { return at::Tensor(); }), {"micro-batch 0", "undefined"}},
        {"sizes", returns([](auto& x) { return x.expand({2}); }), {"micro-batch 0", "[2]"}},
        {"detached", returns([](auto& x) { return x.detach(); }), {"micro-batch 0", "detached"}},
        {"meta", returns(meta), {"micro-batch 0", "meta device"}},
    });
    EXPECT_EQ(run.state->step, 0);
  });
}

TEST(StepTest, MeanOverTakesADistributedLossWhole) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    const double own = 1.0 + static_cast<double>(mesh.local_rank("dp"));
    const at::Tensor value = at::full({}, own, at::kDouble).requires_grad_();
    for (const Placement& placement : {Placement(Replicate{}), Placement(Partial{})}) {
      // The Partial sum of two equal terms is twice each term.
      const bool sums = placement == Placement(Partial{});
      const at::Tensor loss =
          DistributedTensor::from_local(value, mesh["tp"], {placement}).tensor();
      const at::Tensor mean = training::mean_over(loss, mesh["dp"]);
      EXPECT_FALSE(is_distributed(mean) || mean.requires_grad());
      EXPECT_EQ(mean.item<double>(), sums ? 3.0 : 1.5) << rank.rank();
    }
    expect_refusals({
        {"undefined", [&] { training::mean_over({}, mesh["dp"]); }, {"mean_over", "undefined"}},
        {"sizes", [&] { training::mean_over(at::ones({2}), mesh["dp"]); }, {"mean_over", "[2]"}},
        {"meta",
         [&] { training::mean_over(at::ones({}, at::device(at::kMeta)), mesh["dp"]); },
         {"mean_over", "meta device"}},
    });
  });
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
