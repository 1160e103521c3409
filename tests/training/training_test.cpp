// Compares training::step() on meshes with libtorch's calls on one rank. Also tests evaluation,
// StepMeter, recordings, and errors of Checkpointer; other tests of Checkpointer are in
// tests/examples/checkpoint.

#include <nlohmann/json.hpp>

#include <cmath>
#include <limits>
#include <stdexcept>

#include "tessera/dtensor/random.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/optimizer.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/tensor_parallel/styles.h"
#include "tessera/training/checkpointer.h"
#include "tessera/training/recording.h"
#include "tessera/training/step.h"
#include "testing/distributed.h"
#include "testing/files.h"
#include "testing/module_values.h"

namespace tessera::testing {

// A small model, its data and its training. The model's sizes are not divisible by mesh sizes.

struct Mlp : nn::Module<Mlp> {
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) {
    return at::mse_loss((*down)(at::tanh((*up)(x))), y);
  }
  nn::Child<nn::Linear> up{*this, "up", 7, 11}, down{*this, "down", 11, 3};
};

/// The number of rows (samples) in the batch of a training step, over all ranks.
constexpr std::int64_t kBatch = 12;

/// Returns rows [first, first + count) of the data of training step `step`: inputs x and targets y.
inline std::pair<at::Tensor, at::Tensor> rows_of(std::int64_t step, std::int64_t first,
                                                 std::int64_t count) {
  const at::Tensor x = uniform_values({kBatch, 7}, 100.0 + static_cast<double>(step));
  const at::Tensor y = uniform_values({kBatch, 3}, 200.0 + static_cast<double>(step));
  return {x.slice(0, first, first + count), y.slice(0, first, first + count)};
}

/// Trains an Mlp with FSDP and tensor parallelism or, if `hybrid`, with HSDP.
class MlpRun {
 public:
  MlpRun(const Rank& rank, std::int64_t dp, std::int64_t tp, const fsdp::Options& options = {},
         bool hybrid = false)
      : mesh(rank.mesh({dp, tp}, {"dp", "tp"})),
        data(hybrid ? rank.mesh({dp, tp}, {"replicas", "dp"}) : mesh["dp"]),
        model(std::make_shared<Mlp>()) {
    if (tp > 1 && !hybrid) {
      tensor_parallel::parallelize_module(*model, mesh["tp"],
                                          {{"up", tensor_parallel::colwise_parallel()},
                                           {"down", tensor_parallel::rowwise_parallel()}});
    }
    fsdp::fully_shard(*model, data, options);
    nn::init_weights(*model, /*seed=*/3);
    optimizer = std::make_unique<optim::AdamW>(*model, optim::AdamWOptions{.lr = 1e-2});
    state = std::make_unique<training::TrainState>(
        training::TrainState{.model = *model, .optimizer = *optimizer});
  }

  /// Returns the mean loss of this rank's rows of micro-batch `i`.
  at::Tensor loss(std::int64_t i, std::int64_t micro_batches = 1) {
    const std::int64_t own = kBatch / data.size();
    const std::int64_t count = own / micro_batches;
    const std::int64_t place = data.shape().index(data.coordinate());
    const auto [x, y] = rows_of(state->step, place * own + i * count, count);
    return (*model)(x, y);
  }
  training::StepResult step(training::StepOptions options = {}) {
    options.batch = kBatch;
    return training::step(*state, data, options,
                          [&](std::int64_t i) { return loss(i, options.accumulate); });
  }
  at::Tensor weights() const { return testing::parameter_values(*model).detach(); }

  DeviceMesh mesh;
  DeviceMesh data;
  std::shared_ptr<Mlp> model;
  std::unique_ptr<optim::AdamW> optimizer;
  std::unique_ptr<training::TrainState> state;
};

namespace {

using training::StepOptions;
using training::StepResult;

constexpr std::int64_t kSteps = 4;

struct Outcome {
  std::vector<double> losses, norms;
  at::Tensor weights;
};

/// Trains on one rank by libtorch's calls, without training::step().
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
  outcome.weights = testing::parameter_values(model).detach();
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

TEST(StepTest, EqualsAStepOfOneRank) {
  struct Row {
    std::int64_t dp, tp;
    StepOptions options;
    fsdp::Options units{};
    bool hybrid = false;
  };
  for (const Row& row :
       {Row{2, 2, {.max_norm = 0.1}}, Row{2, 1, {.accumulate = 3, .max_norm = 0.1}},
        Row{2,
            2,
            {.accumulate = 2, .sync_each_micro_batch = false, .max_norm = 0.1},
            {.reshard_after_forward = false}},
        Row{2, 2, {.max_norm = 0.1}, {}, /*hybrid=*/true}}) {
    SCOPED_TRACE(row.options.accumulate);
    RunRanks(static_cast<int>(row.dp * row.tp), [&](Rank& rank) {
      MlpRun run(rank, row.dp, row.tp, row.units, row.hybrid);
      expect_one_ranks_steps(run, row.options);
    });
  }
}

TEST_ON_RANKS(StepTest, SumsLossesOfMicroBatchesIfRequested, 2) {
  MlpRun run(rank, 2, 1), other(rank, 2, 1);
  const double loss = run.step({.accumulate = 2}).loss;
  const StepResult summed =
      training::step(*other.state, other.mesh["dp"],
                     {.batch = kBatch, .accumulate = 2, .mean_of_micro_batches = false},
                     [&](std::int64_t i) { return other.loss(i, 2) / 2; });
  EXPECT_EQ(summed.loss, loss);
  EXPECT_TRUE(other.weights().equal(run.weights()));
}

TEST_ON_RANKS(StepTest, UsesTheRateOfTheSchedule, 1) {
  MlpRun run(rank, 1, 1);
  const at::Tensor before = run.weights();
  const optim::LrSchedule schedule({.warmup = 4, .steps = 8});
  EXPECT_EQ(run.step({.schedule = schedule}).lr_factor, 0.25);
  // In its first step, Adam changes each parameter by the learning rate.
  EXPECT_NEAR((run.weights() - before).abs().max().item<double>(), 1e-2 / 4, 1e-4);
  EXPECT_EQ(run.step({.schedule = schedule}).lr_factor, 0.5);
}

TEST_ON_RANKS(StepTest, SkipsAStepWithOverflowedGradients, 2) {
  MlpRun run(rank, 2, 1);
  run.state->scaler = optim::GradScaler({.init_scale = std::numeric_limits<float>::max()});
  const at::Tensor before = run.weights();
  const StepResult result = run.step();
  EXPECT_TRUE(result.skipped);
  EXPECT_EQ(result.loss_scale, std::numeric_limits<float>::max());
  EXPECT_TRUE(run.weights().equal(before));
  EXPECT_EQ(run.state->step, 1);
}

TEST(StepTest, FailsOnAllRanksForANonfiniteLoss) {
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

TEST(StepTest, ChangesNothingForNonfiniteValuesOnCpu) {
  for (const bool scaled : {false, true}) {
    RunRanks(2, [scaled](Rank& rank) {
      MlpRun run(rank, 2, 1);
      run.state->scaler = optim::GradScaler({.enabled = scaled, .init_scale = 8});
      run.step();
      const auto values = [&] {
        std::vector<at::Tensor> all{run.weights()};
        for (const optim::StateTensor& each : run.state->optimizer.state()) {
          all.push_back(local_tensor(each.tensor).clone().flatten());
        }
        return at::cat(all);
      };
      const at::Tensor before = values();
      // With a GradScaler, rank 1's loss is NaN, but rank 1's gradients are finite.
      const double added = rank.rank() == 1 ? std::nan("") : 0;
      EXPECT_ERROR(training::step(*run.state, run.mesh["dp"], {},
                                  [&](std::int64_t i) {
                                    return scaled ? run.loss(i) + added
                                                  : run.loss(i) * std::nan("");
                                  }),
                   "step 2: the loss is nan", scaled ? "a mean over no samples" : "parameter '");
      EXPECT_TRUE(values().equal(before));
      EXPECT_EQ(run.state->step, 1);
      run.step();
      EXPECT_TRUE(run.weights().isfinite().all().item<bool>());
      EXPECT_FALSE(values().equal(before));
    });
  }
}

/// training::step() must also clear gradients of parameters that the optimizer does not have.
TEST_ON_RANKS(StepTest, ClearsGradientsOfUnoptimizedParameters, 1) {
  MlpRun run(rank, 1, 1);
  optim::AdamW optimizer(*run.model->down, {.lr = 0});
  training::TrainState state{.model = *run.model, .optimizer = optimizer};
  const auto norm = [&] {
    return training::step(state, run.mesh["dp"], {}, [&](std::int64_t i) { return run.loss(i); })
        .grad_norm;
  };
  EXPECT_EQ(norm(), norm());
}

/// The loss of micro-batch 1 throws. The next step must be as if this step had never begun.
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

TEST(StepTest, CleansUpAfterALossFunctionThrows) {
  expect_nothing_left({.batch = kBatch, .accumulate = 2}, {});
  expect_nothing_left({.batch = kBatch, .accumulate = 2, .sync_each_micro_batch = false},
                      {.reshard_after_forward = false});
}

TEST_ON_MESH(StepTest, RefusesAModelOutsideTheDataMesh, {2, 2}, {"dp", "tp"}) {
  Mlp model;
  nn::init_weights(model, /*seed=*/3);
  optim::AdamW optimizer(model, {});
  training::TrainState state{.model = model, .optimizer = optimizer};
  const auto rows = rows_of(0, 0, 4);
  const auto step = [&] {
    return training::step(state, mesh["dp"], {.batch = 8},
                          [&](std::int64_t) { return model(rows.first, rows.second); });
  };
  EXPECT_ERROR(step(), "step 1: none of the 4 trained parameters of a tessera::testing::Mlp is on",
               "of 2 ranks", "fsdp::fully_shard or fsdp::replicate");
  // Tensor parallelism reduces no gradients over dp, so step() must throw here, too.
  tensor_parallel::parallelize_module(
      model, mesh["tp"],
      {{"up", tensor_parallel::colwise_parallel()}, {"down", tensor_parallel::rowwise_parallel()}});
  EXPECT_ERROR(step(), "of 2 ranks");
  fsdp::replicate(model, mesh["dp"]);
  EXPECT_GT(step().grad_norm, 0);
}

TEST_ON_RANKS(StepTest, RefusesInvalidOptionsAndLosses, 1) {
  MlpRun run(rank, 1, 1);
  const auto step = [&](const StepOptions& options, const training::LossFunction& loss) {
    training::step(*run.state, run.mesh["dp"], options, loss);
  };
  const auto loss = [&](std::int64_t i) { return run.loss(i); };
  const auto returns = [&](const std::function<at::Tensor(const at::Tensor&)>& change) {
    return [&step, &run, change] { step({}, [&](std::int64_t i) { return change(run.loss(i)); }); };
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
}

TEST_ON_MESH(StepTest, MeanOverUsesTheWholeDistributedLoss, {2, 2}, {"dp", "tp"}) {
  const double own = 1.0 + static_cast<double>(mesh.local_rank("dp"));
  const at::Tensor value = at::full({}, own, at::kDouble).requires_grad_();
  for (const Placement& placement : {Placement(Replicate{}), Placement(Partial{})}) {
    // On both tp ranks, a Partial loss has the same term, and its value is the sum: twice the term.
    const bool sums = placement == Placement(Partial{});
    const at::Tensor loss = DistributedTensor::from_local(value, mesh["tp"], {placement}).tensor();
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
}

TEST(StepTest, NamesStepAndRankInErrorsOfLibtorch) {
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

TEST_ON_RANKS(EvaluationTest, AveragesOverBatchesAndRanksAndCanBeStopped, 2) {
  MlpRun run(rank, 2, 1);
  const auto loss = [&](std::int64_t batch) {
    EXPECT_FALSE(run.model->is_training());
    const auto [x, y] = rows_of(batch, rank.rank() * 6, 6);
    return (*run.model)(x, y);
  };
  Mlp alone;
  nn::init_weights(alone, /*seed=*/3);
  double expected = 0;
  for (std::int64_t batch = 0; batch < 3; ++batch) {
    const auto [x, y] = rows_of(batch, 0, kBatch);
    expected += alone(x, y).item<double>() / 3;
  }
  EXPECT_NEAR(training::evaluate(*run.model, run.mesh["dp"], 3, loss).value(), expected, 1e-6);
  EXPECT_TRUE(run.model->is_training());
  int batches = 0;
  const auto stop = [&] { return ++batches == 2; };
  EXPECT_FALSE(training::evaluate(*run.model, run.mesh["dp"], 9, loss, stop).has_value());
  EXPECT_EQ(batches, 2);
  EXPECT_TRUE(run.model->is_training());
  EXPECT_ERROR(training::evaluate(*run.model, run.mesh["dp"], 0, loss), "batches is 0");
}

TEST_ON_RANKS(EvaluationTest, UsesAveragedWeightsAndRestoresTheOriginals, 2) {
  MlpRun run(rank, 2, 1);
  const at::Tensor initial = run.weights();
  optim::Ema ema(std::make_shared<optim::AdamW>(*run.model, optim::AdamWOptions{.lr = 1e-2}), 0.5);
  training::TrainState state{.model = *run.model, .optimizer = ema};
  training::step(state, run.mesh["dp"], {}, [&](std::int64_t i) { return run.loss(i); });
  const at::Tensor trained = run.weights();
  training::with_averaged_weights(
      ema, [&] { EXPECT_TRUE(run.weights().allclose((initial + trained) / 2)); });
  EXPECT_TRUE(run.weights().equal(trained));
  EXPECT_ERROR(training::with_averaged_weights(ema, [] { fail("no held-out data"); }),
               "no held-out data");
  EXPECT_TRUE(run.weights().equal(trained));
  training::with_averaged_weights(*run.optimizer,
                                  [&] { EXPECT_TRUE(run.weights().equal(trained)); });
}

TEST_ON_RANKS(StepMeterTest, CountsOnlyTrafficOfTheStep, 2) {
  MlpRun run(rank, 2, 1);
  training::StepMeter meter(rank.world(), "cpu");
  std::vector<observe::StepMetrics> steps;
  for (int i = 0; i < 3; ++i) {
    meter.begin();
    meter.data_ready();
    const training::StepResult result = run.step();
    steps.push_back(meter.end(*run.state, result, 1e-2));
    EXPECT_EQ(steps.back().loss, result.loss);
    EXPECT_EQ(steps.back().step, i + 1);
    EXPECT_LE(steps.back().data_time_s, steps.back().step_time_s);
  }
  EXPECT_EQ(nlohmann::json::parse(observe::to_json(steps[1])).at("comm"),
            nlohmann::json::parse(observe::to_json(steps[2])).at("comm"));
  EXPECT_FALSE(steps[2].comm.empty());
}

TEST(RecordingTest, ProfilesTheModulesAndOperatorsOfTheLastStep) {
  const TemporaryFolder folder;
  RunRanks(1, [&](Rank& rank) {
    training::Recording refused({.profile = folder.path(), .steps = 3});
    EXPECT_ERROR(refused.begin(*rank.world(), 0), "can't write profile", "regular file");
    training::Recording recording({.profile = folder / "p.json", .steps = 2});
    MlpRun run(rank, 1, 1);
    recording.begin(*rank.world(), 0);
    for (int i = 0; i < 2; ++i) {
      EXPECT_FALSE(std::filesystem::exists(folder / "p.json"));
      recording.run(*run.state, [&] {
        run.step();
        return observe::StepMetrics{};
      });
    }
  });
  EXPECT_CONTAINS(ReadFile(folder / "p.json"), "\"up: forward\"", "\"down: forward\"",
                  "aten::addmm");
}

using training::Checkpointer;
using training::CheckpointOptions;
using training::Resume;

TEST(CheckpointerTest, RestoresRandomNumbersAndLossScale) {
  const TemporaryFolder folder;
  RunRanks(2, [&](Rank& rank) {
    MlpRun run(rank, 2, 1), resumed(rank, 2, 1);
    CheckpointOptions options{.folder = folder / "run", .steps = 2};
    run.state->scaler = resumed.state->scaler = optim::GradScaler({.init_scale = 8});
    run.state->scaler.load_state({.scale = 4, .steps_since_overflow = 5});
    set_random_state({.seed = 5, .calls = 7});
    Checkpointer checkpoints(options, rank.world());
    run.step();
    run.step();
    checkpoints.after_step(*run.state, {{"mine", 42}});
    EXPECT_EQ(checkpoints.finish(*run.state), nullptr);
    set_random_state({.seed = 1, .calls = 1});
    options.resume = Resume::kAuto;
    Checkpointer again(options, rank.world());
    EXPECT_EQ(again.peek(*resumed.state).at("mine"), 42);
    again.load(*resumed.state);
    EXPECT_EQ(resumed.state->scaler.state(), run.state->scaler.state());
    EXPECT_EQ(random_state().seed, 5U);
    EXPECT_EQ(random_state().calls, 7U);
  });
}

TEST(CheckpointerTest, FinishReturnsTheErrorOfTheLastSave) {
  const TemporaryFolder folder;
  RunRanks(2, [&](Rank& rank) {
    MlpRun run(rank, 2, 1);
    Checkpointer checkpoints({.folder = folder / "run", .steps = 1}, rank.world());
    run.step();
    if (rank.rank() == 0) {
      WriteFile(folder / "run", "no folder");
    }
    checkpoints.after_step(*run.state);
    const std::exception_ptr failed = checkpoints.finish(*run.state);
    ASSERT_NE(failed, nullptr);
    EXPECT_ERROR(std::rethrow_exception(failed), "step-00000001' was not saved: ");
  });
}

TEST(CheckpointerTest, RefusesInvalidUse) {
  const TemporaryFolder folder;
  RunRanks(1, [&](Rank& rank) {
    MlpRun run(rank, 1, 1);
    checkpoint::save(*rank.world(), folder / "foreign", 1,
                     {*run.model, optim::named_state(*run.optimizer, *run.model)});
    Checkpointer foreign({.steps = 2, .initial_load = folder / "foreign"}, rank.world());
    Checkpointer first({.folder = folder / "run"}, rank.world());
    Checkpointer second({.folder = folder / "run"}, rank.world());
    first.make_folder();
    const auto make = [&](CheckpointOptions options) {
      return [options, &rank] { Checkpointer(options, rank.world()); };
    };
    expect_refusals({
        {"foreign", [&] { foreign.load(*run.state); }, {"was not saved by training"}},
        {"folder", [&] { second.make_folder(); }, {"is in use by another run"}},
        {"keep", make({.steps = 5, .keep = 1}), {"keep is 1", "keep 2 or more"}},
        {"every", make({.every = -2, .steps = 5}), {"checkpoint-every is -2", "0 for one"}},
        {"exclude",
         make({.steps = 5, .exclude = {"optimizer", "optimiser"}}),
         {"exclude: 'optimiser' can't be excluded; pass optimizer or data"}},
    });
  });
}

}  // namespace
}  // namespace tessera::testing
