#include "tessera/training/checkpointer.h"

#include "mlp_run.h"
#include "tessera/dtensor/manual_seed.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::testing {
namespace {

using training::Checkpointer;
using training::CheckpointOptions;
using training::Resume;

/// Trains up to step `last`, with checkpoints where they are due. Returns the losses.
std::vector<double> train(MlpRun& run, Checkpointer& checkpoints, std::int64_t last) {
  std::vector<double> losses;
  while (run.state->step < last) {
    losses.push_back(run.step().loss);
    checkpoints.after_step(*run.state);
  }
  return losses;
}

/// Compares a run of six steps with a run that is resumed after the third.
void expect_same_resumed(int ranks, std::int64_t dp, std::int64_t tp, bool async) {
  const TemporaryFolder folder;
  RunRanks(ranks, [&](Rank& rank) {
    MlpRun whole(rank, dp, tp), first(rank, dp, tp), second(rank, dp, tp);
    CheckpointOptions options{.folder = folder / "run", .every = 3, .steps = 6, .async = async};
    std::vector<double> expected;
    for (int step = 0; step < 6; ++step) {
      expected.push_back(whole.step().loss);
    }
    {
      Checkpointer checkpoints(options, rank.world());
      EXPECT_FALSE(checkpoints.loads());
      train(first, checkpoints, 3);
      EXPECT_EQ(checkpoints.finish(*first.state), nullptr);
    }
    options.resume = Resume::kNewest;
    Checkpointer checkpoints(options, rank.world());
    EXPECT_TRUE(checkpoints.resumes());
    checkpoints.load(*second.state);
    EXPECT_EQ(second.state->step, 3);
    EXPECT_EQ(second.state->samples, 3 * kBatch);
    const std::vector<double> losses = train(second, checkpoints, 6);
    EXPECT_EQ(losses, std::vector<double>(expected.begin() + 3, expected.end()));
    EXPECT_TRUE(second.weights().equal(whole.weights()));
    EXPECT_EQ(checkpoints.finish(*second.state), nullptr);
  });
}

TEST(CheckpointerTest, AResumedRunIsBitEqual) {
  expect_same_resumed(4, 2, 2, /*async=*/true);
  expect_same_resumed(3, 3, 1, /*async=*/false);
}

TEST(CheckpointerTest, RandomNumbersAndTheLossScaleContinue) {
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

TEST(CheckpointerTest, SavesEverySoManyStepsAtTheLastAndWhenTheRunMustStop) {
  const TemporaryFolder folder;
  RunRanks(2, [&](Rank& rank) {
    MlpRun run(rank, 2, 1), stopped(rank, 2, 1);
    Checkpointer checkpoints({.folder = folder / "run", .every = 2, .steps = 5}, rank.world());
    train(run, checkpoints, 5);
    EXPECT_EQ(checkpoints.finish(*run.state), nullptr);
    Checkpointer others({.folder = folder / "stopped", .every = 2, .steps = 5}, rank.world());
    stopped.step();
    EXPECT_FALSE(others.after_step(*stopped.state));
    EXPECT_TRUE(others.after_step(*stopped.state, {}, /*stopped=*/true));
    EXPECT_TRUE(std::filesystem::exists(folder / "stopped/step-00000001/manifest.json"));
    EXPECT_EQ(others.finish(*stopped.state), nullptr);
  });
  for (const std::string step : {"step-00000002", "step-00000004", "step-00000005"}) {
    EXPECT_TRUE(std::filesystem::exists(folder / "run" / step / "manifest.json")) << step;
  }
}

TEST(CheckpointerTest, ARunBeginsOnlyWhereThereAreNoSteps) {
  const TemporaryFolder folder;
  RunRanks(2, [&](Rank& rank) {
    MlpRun run(rank, 2, 1);
    CheckpointOptions options{.folder = folder / "run", .steps = 1};
    options.resume = Resume::kNewest;
    EXPECT_ERROR(Checkpointer(options, rank.world()), "resume: '",
                 "has no step that was saved whole");
    options.resume = Resume::kAuto;
    Checkpointer checkpoints(options, rank.world());
    EXPECT_FALSE(checkpoints.loads());
    train(run, checkpoints, 1);
    EXPECT_EQ(checkpoints.finish(*run.state), nullptr);
    options.resume = Resume::kNever;
    EXPECT_ERROR(Checkpointer(options, rank.world()), "has steps of a run; pass resume");
    options.names = {.program = "program", .dashes = "--"};
    EXPECT_ERROR(Checkpointer(options, rank.world()), "--checkpoint: '", "pass --resume");
  });
}

TEST(CheckpointerTest, OptionsThatMakeNoSenseAreRefusedAtOnce) {
  RunRanks(1, [&](Rank& rank) {
    const auto make = [&](CheckpointOptions options) { Checkpointer(options, rank.world()); };
    EXPECT_ERROR(make({.steps = 5, .keep = 1}), "newest 1 checkpoints", "keep 2 or more");
    EXPECT_ERROR(make({.every = -2, .steps = 5}), "every -2 steps", "0, one at the end");
    EXPECT_ERROR(make({.steps = 5, .exclude = {"optimizer", "optimiser"}}),
                 "exclude: 'optimiser' can't be left out; optimizer and data can");
    make({.steps = 5, .keep = 2, .exclude = {"optimizer", "data"}});
  });
}

TEST(CheckpointerTest, AnotherRunsWeightsBeginARun) {
  const TemporaryFolder folder;
  RunRanks(2, [&](Rank& rank) {
    MlpRun run(rank, 2, 1), other(rank, 2, 1);
    Checkpointer checkpoints({.folder = folder / "run", .steps = 2}, rank.world());
    train(run, checkpoints, 2);
    EXPECT_EQ(checkpoints.finish(*run.state), nullptr);
    Checkpointer begins(
        {.steps = 2, .initial_load = folder / "run", .exclude = {"optimizer", "data"}},
        rank.world());
    EXPECT_TRUE(begins.loads());
    EXPECT_FALSE(begins.resumes());
    begins.load(*other.state);
    EXPECT_EQ(begins.loaded_step(), 2);
    EXPECT_EQ(other.state->step, 0);
    EXPECT_EQ(other.state->samples, 0);
    EXPECT_TRUE(other.weights().equal(run.weights()));
  });
}

TEST(CheckpointerTest, AStepOfAnotherProgramIsRefused) {
  const TemporaryFolder folder;
  RunRanks(2, [&](Rank& rank) {
    MlpRun run(rank, 2, 1);
    checkpoint::save(*rank.world(), folder / "foreign", 1,
                     {*run.model, optim::named_state(*run.optimizer, *run.model)});
    Checkpointer checkpoints({.steps = 2, .initial_load = folder / "foreign"}, rank.world());
    EXPECT_ERROR(checkpoints.load(*run.state), "is not of training; take its weights");
  });
}

TEST(CheckpointerTest, FinishThrowsTheErrorOfTheLastSave) {
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

TEST(CheckpointerTest, TwoRunsCannotHaveOneFolder) {
  const TemporaryFolder folder;
  RunRanks(1, [&](Rank& rank) {
    Checkpointer checkpoints({.folder = folder / "run"}, rank.world());
    Checkpointer other({.folder = folder / "run"}, rank.world());
    checkpoints.make_folder();
    EXPECT_ERROR(other.make_folder(), "is in use by another run");
  });
}

}  // namespace
}  // namespace tessera::testing
