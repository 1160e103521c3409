// The parts of a training around its steps: evaluation, stops by signals, metrics, recordings.

#include <nlohmann/json.hpp>
#include <sstream>

#include "mlp_run.h"
#include "tessera/optim/optimizer.h"
#include "tessera/training/checkpointer.h"
#include "tessera/training/recording.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::testing {
namespace {

/// The records in a file of JSON lines.
std::vector<nlohmann::json> records_of(const std::filesystem::path& file) {
  std::istringstream lines(ReadFile(file));
  std::vector<nlohmann::json> records;
  for (std::string line; std::getline(lines, line);) {
    records.push_back(nlohmann::json::parse(line));
  }
  return records;
}

TEST(SameOptions, NameWhatOneRankHasOtherwise) {
  RunRanks(3, [](Rank& rank) {
    using training::check_same_options;
    check_same_options(*rank.world(), {{"--lr", "0.1"}, {"--steps", "3"}});
    const std::string own = rank.rank() == 2 ? "0.2" : "0.1";
    EXPECT_ERROR(check_same_options(*rank.world(), {{"--a", "x"}, {"--lr", own}}),
                 "rank 2 has --lr 0.2, but rank 0 has --lr 0.1; start all ranks with the same");
    const std::string resume = rank.rank() == 1 ? "auto" : "";
    EXPECT_ERROR(check_same_options(*rank.world(), {{"--resume", resume}}),
                 "rank 1 has --resume auto, but rank 0 has no --resume");
  });
}

TEST(EvaluationTest, IsTheMeanOverBatchesAndRanks) {
  RunRanks(2, [](Rank& rank) {
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
  });
}

TEST(EvaluationTest, EndsWhenAskedToStop) {
  RunRanks(2, [](Rank& rank) {
    MlpRun run(rank, 2, 1);
    int batches = 0;
    const auto loss = [&](std::int64_t) { return run.loss(0); };
    const auto stop = [&] { return ++batches == 2; };
    EXPECT_FALSE(training::evaluate(*run.model, run.mesh["dp"], 9, loss, stop).has_value());
    EXPECT_EQ(batches, 2);
    EXPECT_TRUE(run.model->is_training());
    EXPECT_ERROR(training::evaluate(*run.model, run.mesh["dp"], 0, loss), "0 batches");
  });
}

TEST(EvaluationTest, IsDueEverySoManyStepsAndAtTheLast) {
  const training::EvaluationOptions options{.every = 3, .steps = 7};
  std::vector<std::int64_t> due;
  for (std::int64_t step = 1; step <= 7; ++step) {
    if (options.is_due(step)) {
      due.push_back(step);
    }
  }
  EXPECT_EQ(due, (std::vector<std::int64_t>{3, 6, 7}));
  EXPECT_FALSE((training::EvaluationOptions{.steps = 7}.is_due(7)));
}

TEST(EvaluationTest, UsesTheAveragesAndRestoresTheWeights) {
  RunRanks(2, [](Rank& rank) {
    MlpRun run(rank, 2, 1);
    const at::Tensor initial = run.weights();
    optim::Ema ema(std::make_shared<optim::AdamW>(*run.model, optim::AdamWOptions{.lr = 1e-2}),
                   0.5);
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
  });
}

TEST(StopTest, IsRequestedOnAllRanksByOne) {
  RunOnMesh({2, 2}, {"dp", "tp"}, [](Rank& rank, const DeviceMesh& mesh) {
    EXPECT_FALSE(training::stop_requested(false, mesh));
    EXPECT_TRUE(training::stop_requested(rank.rank() == 2, mesh));
  });
}

TEST(StepMeterTest, CountsTheTrafficOfItsStepAlone) {
  RunRanks(2, [](Rank& rank) {
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
  });
}

observe::StepMetrics metrics_of(std::int64_t step, double loss = 0) {
  observe::StepMetrics metrics;
  metrics.step = step;
  metrics.loss = loss;
  return metrics;
}

TEST(MetricLogTest, ACheckpointsStallIsRecordedWithTheNextStepOrTheLast) {
  const TemporaryFolder folder;
  RunRanks(2, [&](Rank& rank) {
    training::MetricLog log({.metrics = folder / "metrics.jsonl", .steps = 2}, rank.world());
    log.open(0);
    log.write(metrics_of(1), 0);
    log.stalled(0.25);
    log.write(metrics_of(2), 0);
    log.stalled(0.5);
    log.end();
  });
  const std::vector<nlohmann::json> records = records_of(folder / "metrics.jsonl");
  ASSERT_EQ(records.size(), 2U);
  EXPECT_FALSE(records[0].contains("checkpoint_stall_s"));
  EXPECT_EQ(records[1].at("checkpoint_stall_s"), 0.75);
}

TEST(MetricLogTest, AResumedRunKeepsTheStepsThatAreDone) {
  const TemporaryFolder folder;
  RunRanks(1, [&](Rank& rank) {
    const training::MetricOptions options{.metrics = folder / "metrics.jsonl", .steps = 3};
    {
      training::MetricLog log(options, rank.world());
      log.open(0);
      log.write(metrics_of(1, 1), 0);
      log.write(metrics_of(2, 2), 0);
    }
    training::MetricLog log(options, rank.world());
    log.open(1);
    log.write(metrics_of(2, 4), 0);
  });
  const std::vector<nlohmann::json> records = records_of(folder / "metrics.jsonl");
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[0].at("loss"), 1);
  EXPECT_EQ(records[1].at("loss"), 4);
}

TEST(RecordingTest, ProfilesTheModulesAndOperatorsOfTheLastStep) {
  const TemporaryFolder folder;
  RunRanks(1, [&](Rank& rank) {
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
  EXPECT_CONTAINS(ReadFile(folder / "p.json"), "\"up: forward\"", "\"down: backward\"",
                  "aten::addmm");
}

TEST(RecordingTest, AFileThatCannotBeWrittenIsNamedBeforeTheFirstStep) {
  const TemporaryFolder folder;
  RunRanks(1, [&](Rank& rank) {
    training::Recording recording({.profile = folder.path(), .steps = 3});
    EXPECT_ERROR(recording.begin(*rank.world(), 0), "can't write profile", "regular file");
  });
}

}  // namespace
}  // namespace tessera::testing
