// In which order units gather, compute and reduce, and what waits for what. The streams only
// record, so that this needs no GPU.

#include <algorithm>

#include "fsdp/training/training.h"
#include "fsdp/unit.h"
#include "recording_streams.h"

namespace tessera::fsdp {
namespace {

using testing::record;
using testing::RecordingStreams;
using Log = std::vector<std::string>;

/// Notes of the last of some steps of a model of three blocks on two ranks.
Log notes_of_step(const std::function<void(SmallModel&)>& prepare, const Options& options = {},
                  int steps = 1) {
  Log notes;
  RunRanks(2, [&](Rank& rank) {
    ShardedModel model(rank.mesh({2}, {"dp"}), options, {4, 6, 2});
    const auto streams = record(model);
    prepare(model);
    for (int step = 0; step < steps; ++step) {
      streams->clear();
      local_loss(model, rank).backward();
    }
    if (rank.rank() == 0) {
      notes = streams->notes();
    }
  });
  return notes;
}

const Log kForward{"all_gather the root unit", "unshard the root unit", "all_gather unit 'block0'",
                   "unshard unit 'block0'",    "reshard unit 'block0'", "all_gather unit 'block1'",
                   "unshard unit 'block1'",    "reshard unit 'block1'", "all_gather unit 'block2'",
                   "unshard unit 'block2'"};

Log followed_by(Log log, const Log& rest) {
  log.insert(log.end(), rest.begin(), rest.end());
  return log;
}

// FSDP2's order: each unit of backward gathers the one before it while it computes itself.
TEST(Streams, PrefetchBackwardInReverseOrderOfForward) {
  EXPECT_EQ(notes_of_step([](SmallModel&) {}),
            followed_by(kForward, {"reshard unit 'block2'",     //
                                   "all_gather unit 'block2'",  // with the root's backward
                                   "unshard unit 'block2'",     //
                                   "all_gather unit 'block1'",  //
                                   "reshard unit 'block2'",     //
                                   "reduce_scatter unit 'block2'",
                                   "unshard unit 'block1'",     //
                                   "all_gather unit 'block0'",  //
                                   "reshard unit 'block1'",     //
                                   "reduce_scatter unit 'block1'",
                                   "unshard unit 'block0'",  //
                                   "reshard unit 'block0'",  //
                                   "reduce_scatter unit 'block0'",
                                   "reshard the root unit",  //
                                   "reduce_scatter the root unit"}));
}

TEST(Streams, GatherOnceWithoutResharding) {
  EXPECT_EQ(notes_of_step([](SmallModel&) {}, {.reshard_after_forward = false}),
            (Log{"all_gather the root unit", "unshard the root unit",      //
                 "all_gather unit 'block0'", "unshard unit 'block0'",      //
                 "all_gather unit 'block1'", "unshard unit 'block1'",      //
                 "all_gather unit 'block2'", "unshard unit 'block2'",      //
                 "reshard unit 'block2'", "reduce_scatter unit 'block2'",  //
                 "reshard unit 'block1'", "reduce_scatter unit 'block1'",  //
                 "reshard unit 'block0'", "reduce_scatter unit 'block0'",  //
                 "reshard the root unit", "reduce_scatter the root unit"}));
}

TEST(Streams, PrefetchTheRequestedUnitsInForward) {
  // Also where the order of the last forward would say otherwise.
  for (const int steps : {1, 2}) {
    const Log notes = notes_of_step(
        [](SmallModel& model) {
          set_forward_prefetch(model, {model.blocks[0].get(), model.blocks[1].get()});
          set_forward_prefetch(*model.blocks[1], {model.blocks[2].get()});
        },
        {}, steps);
    const Log forward(notes.begin(), notes.begin() + 10);
    EXPECT_EQ(forward,
              (Log{"all_gather the root unit", "unshard the root unit", "all_gather unit 'block0'",
                   "all_gather unit 'block1'", "unshard unit 'block0'", "reshard unit 'block0'",
                   "unshard unit 'block1'", "all_gather unit 'block2'", "reshard unit 'block1'",
                   "unshard unit 'block2'"}));
  }
}

TEST(Streams, PrefetchTheRequestedUnitsInBackwardAndFreeUnusedOnes) {
  const Log notes = notes_of_step([](SmallModel& model) {
    set_backward_prefetch(*model.blocks[2], {model.blocks[0].get()});
    set_backward_prefetch(*model.blocks[0], {model.blocks[2].get()});  // too late
  });
  const Log backward(notes.begin() + 11, notes.end());
  EXPECT_EQ(
      backward,
      (Log{"all_gather unit 'block2'", "unshard unit 'block2'", "all_gather unit 'block0'",
           "reshard unit 'block2'", "reduce_scatter unit 'block2'", "all_gather unit 'block1'",
           "unshard unit 'block1'", "reshard unit 'block1'", "reduce_scatter unit 'block1'",
           "unshard unit 'block0'", "all_gather unit 'block2'", "reshard unit 'block0'",
           "reduce_scatter unit 'block0'", "reshard the root unit",
           "reduce_scatter the root unit"}));
}

/// The whole log of one step of a single unit on two ranks.
Log log_of_linear(const Options& options, std::int64_t rows) {
  Log log;
  RunRanks(2, [&](Rank& rank) {
    Filled<nn::Linear> linear(3, rows, {.bias = false});
    fully_shard(linear, rank.mesh({2}, {"dp"}), options);
    const auto streams = testing::record(linear);
    linear(testing::uniform_values({2, 3}, 1)).sum().backward();
    if (rank.rank() == 0) {
      log = streams->log();
    }
  });
  return log;
}

/// How a step of a single unit begins, up to the use of its parameter, and then `rest`.
Log gathered_and_then(const Log& rest) {
  Log log{"compute: record 1",
          "all_gather: wait 1",  // the optimizer's update of the shards
          "compute: record 2",
          "all_gather: wait 2",  // which the first step lays out
          "all_gather the root unit", "enter all_gather", "leave",
          "unshard the root unit",    "enter all_gather", "leave",
          "all_gather: record 3",     "compute: wait 3"};
  log.insert(log.end(), rest.begin(), rest.end());
  return log;
}

TEST(Streams, WaitForEachOtherWherePackingNeedsIt) {
  // Split on columns: packed both ways.
  const Options columns{.shard_placement = [](const std::string&, const at::Tensor&) {
    return std::optional<Placement>(Shard{1});
  }};
  EXPECT_EQ(log_of_linear(columns, 4),
            gathered_and_then(
                {"compute: record 4",  // unpacked: the gather buffer is free again
                                       // Unpacked into compute's own memory: no wait is needed.
                 "reshard the root unit",
                 "all_gather: wait 4",  // the gather buffer is freed
                 "reduce_scatter the root unit", "compute: record 5",
                 "reduce_scatter: wait 5",  // packed
                 "enter reduce_scatter", "leave", "enter reduce_scatter",
                 "reduce_scatter: record 6", "leave", "reduce_scatter: record 7",
                 "compute: wait 7",     // gradients for the optimizer
                 "compute: wait 6"}));  // the packed gradients are freed
}

TEST(Streams, KeepGradientsUntilTheyAreReducedInPlace) {
  EXPECT_EQ(log_of_linear({}, 4),
            gathered_and_then({"reshard the root unit", "compute: record 4", "all_gather: wait 4",
                               "reduce_scatter the root unit", "compute: record 5",
                               "reduce_scatter: wait 5", "enter reduce_scatter", "leave",
                               "enter reduce_scatter", "reduce_scatter: record 6", "leave",
                               "reduce_scatter: record 7", "compute: wait 7",
                               "compute: wait 6"}));  // then autograd's gradient is freed
}

/// What the all-gather lane waits for when a step begins, for which `set` may name an event.
Log waits_before_gather(nn::Linear& linear, RecordingStreams& streams,
                        const std::function<void()>& set) {
  set();
  streams.clear();
  linear(testing::uniform_values({2, 3}, 1)).sum().backward();
  const Log& log = streams.log();
  const auto gather = std::find(log.begin(), log.end(), "all_gather the root unit");
  return {log.begin(), gather};
}

TEST(Streams, LetTheNextForwardsGathersWaitForTheUpdateAlone) {
  RunRanks(2, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 4, {.bias = false});
    fully_shard(linear, rank.mesh({2}, {"dp"}));
    const auto streams = testing::record(linear);
    linear(testing::uniform_values({2, 3}, 1)).sum().backward();
    const comm::StreamEventPtr update = streams->record(comm::Lane::kCompute);
    const std::string number =
        std::to_string(static_cast<RecordingStreams::Event&>(*update).number);
    EXPECT_EQ(waits_before_gather(linear, *streams, [&] { set_post_optim_event(linear, update); }),
              Log{"all_gather: wait " + number});
    // Once: the step after waits for all of the compute lane again.
    const Log next = waits_before_gather(linear, *streams, [] {});
    ASSERT_EQ(next.size(), 2u);
    EXPECT_TRUE(next[0].starts_with("compute: record")) << next[0];
    EXPECT_NE(next[1], "all_gather: wait " + number);
    // An event that has passed: for nothing.
    EXPECT_EQ(waits_before_gather(linear, *streams, [&] { set_post_optim_event(linear, nullptr); }),
              Log{});
  });
}

TEST(Streams, AreLeftAloneOnOneRank) {
  RunRanks(1, [](Rank& rank) {
    ShardedModel model(rank.mesh({1}, {"dp"}), {}, {4, 6, 2});
    const auto streams = record(model);
    local_loss(model, rank).backward();
    for (const std::string& line : streams->log()) {
      EXPECT_NE(line, "enter all_gather");
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp
