// Tests the order in which units gather, compute and reduce, and the events for which streams wait.
// RecordingStreams only record calls, so no GPU is needed.

#include <iterator>

#include "fsdp/recording_streams.h"
#include "fsdp/training/training.h"
#include "fsdp/unit.h"
#include "testing/layouts.h"

namespace tessera::fsdp::streams {

using Log = std::vector<std::string>;

std::string number_in(const std::string& line) {
  return line.substr(line.rfind(' ') + 1);
}

std::string number_of(const comm::StreamEventPtr& event) {
  return std::to_string(static_cast<const RecordingStreams::Event&>(*event).number);
}

/// Expands abbreviated notes: "+1" is the gather of block 1, "=1" the unshard, "-1" the reshard,
/// "r1" the reduction of the gradients; "." is the root in place of a block's index.
Log notes(const Log& words) {
  Log lines;
  for (const std::string& word : words) {
    for (const std::string& note : testing::split(word, ' ')) {
      const char* act = note[0] == '+'   ? "all_gather"
                        : note[0] == '=' ? "unshard"
                        : note[0] == '-' ? "reshard"
                                         : "reduce_scatter";
      const std::string unit =
          note[1] == '.' ? "the root unit" : "unit 'block" + note.substr(1) + "'";
      lines.push_back(act + (" " + unit));
    }
  }
  return lines;
}

/// Trains a model of three blocks on two ranks. Returns the notes of the last step.
Log notes_of_step(const std::function<void(SmallModel&)>& prepare, const Options& options = {},
                  int steps = 1) {
  Log notes;
  RunSharded(2, options, [&](Rank& rank, ShardedModel& model) {
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

// As in FSDP2, the backward of a unit overlaps the gather for the next unit in backward.
TEST(Streams, PrefetchBackwardInReverseOrderOfForward) {
  EXPECT_EQ(notes_of_step([](SmallModel&) {}),
            notes({"+. =. +0 =0 -0 +1 =1 -1 +2 =2 -2",  // forward; other notes: backward
                   "+2 =2 +1 -2 r2", "=1 +0 -1 r1", "=0 -0 r0", "-. r."}));
}

TEST(Streams, GatherOnceWithoutResharding) {
  EXPECT_EQ(notes_of_step([](SmallModel&) {}, {.reshard_after_forward = false}),
            notes({"+. =. +0 =0 +1 =1 +2 =2", "-2 r2 -1 r1 -0 r0 -. r."}));
}

TEST(Streams, PrefetchTheRequestedUnitsInForward) {
  // set_forward_prefetch() gives the units to prefetch; the order of the last forward is not used.
  for (const int steps : {1, 2}) {
    const Log found = notes_of_step(
        [](SmallModel& model) {
          set_forward_prefetch(model, {model.blocks[0].get(), model.blocks[1].get()});
          set_forward_prefetch(*model.blocks[1], {model.blocks[2].get()});
        },
        {}, steps);
    EXPECT_EQ(Log(found.begin(), found.begin() + 10), notes({"+. =. +0 +1 =0 -0 =1 +2 -1 =2"}));
  }
}

TEST(Streams, PrefetchTheRequestedUnitsInBackwardAndFreeUnusedUnits) {
  const Log found = notes_of_step([](SmallModel& model) {
    set_backward_prefetch(*model.blocks[2], {model.blocks[0].get()});
    set_backward_prefetch(*model.blocks[0], {model.blocks[2].get()});
  });
  EXPECT_EQ(Log(found.begin() + 11, found.end()),
            notes({"+2 =2 +0 -2 r2", "+1 =1 -1 r1", "=0 +2 -0 r0", "-. r."}));
}

TEST_ON_RANKS(PostOptimEvent, IsWhatTheNextGathersWaitFor, 2) {
  Filled<nn::Linear> linear(3, 4, {.bias = false});
  fully_shard(linear, rank.mesh({2}, {"dp"}));
  const auto streams = record(linear);
  const auto waits_of_step = [&] {
    streams->clear();
    linear(uniform_values({2, 3}, 1)).sum().backward();
    const Log& log = streams->log();
    return Log(log.begin(), std::ranges::find(log, "all_gather the root unit"));
  };
  waits_of_step();
  const comm::StreamEventPtr update = streams->record(comm::Lane::kCompute);
  const std::string wait = "all_gather: wait " + number_of(update);
  set_post_optim_event(linear, update);
  EXPECT_EQ(waits_of_step(), Log{wait});
  // set_post_optim_event() applies to one step. In the next step, gathers wait for the compute
  // stream.
  const Log next = waits_of_step();
  ASSERT_EQ(next.size(), 2u);
  EXPECT_TRUE(next[0].starts_with("compute: record")) << next[0];
  EXPECT_NE(next[1], wait);
  set_post_optim_event(linear, nullptr);  // nullptr: gathers wait for nothing
  EXPECT_EQ(waits_of_step(), Log{});
}

TEST_SHARDED(Streams, UseOnlyTheComputeLaneOnOneRank, 1) {
  set_gradient_divide_factor(model, 2);
  const auto streams = record(model);
  local_loss(model, rank).backward();
  for (const std::string& line : streams->log()) {
    EXPECT_FALSE(line.starts_with("enter")) << line;
  }
}

// A program can have written parameters on the compute stream, so the gather must wait for the
// compute stream.
TEST(ExplicitGather, WaitsForTheComputeLane) {
  for (const auto gather :
       {+[](nn::ModuleBase& module) { unshard(module); },
        +[](nn::ModuleBase& module) { start_unshard(module).wait(); },
        +[](nn::ModuleBase& module) { const UnshardScope unsharded(module); }}) {
    RunRanks(2, [&](Rank& rank) {
      Filled<nn::Linear> linear(3, 4);
      fully_shard(linear, rank.mesh({2}, {"dp"}));
      const auto streams = record(linear);
      linear(uniform_values({2, 3}, 1)).sum().backward();
      streams->clear();
      gather(linear);
      const Log& log = streams->log();
      ASSERT_GE(log.size(), 3u);
      EXPECT_TRUE(log[0].starts_with("compute: record ")) << log[0];
      EXPECT_EQ(log[1], "all_gather: wait " + number_in(log[0]));
      EXPECT_EQ(log[2], "all_gather the root unit");
    });
  }
}

// During a unit's forward, FSDP gathers the unit that came next in the previous forward.

Log log_of_forward(SmallModel& model, const Rank& rank, RecordingStreams& streams) {
  streams.clear();
  const at::Tensor loss = local_loss(model, rank);
  Log log = streams.log();
  loss.backward();
  return log;
}

Log between(const Log& log, const std::string& first, const std::string& last) {
  const auto begin = std::ranges::find(log, first);
  const auto end = std::find(begin, log.end(), last);
  EXPECT_NE(end, log.end()) << first << " ... " << last;
  return {begin, end};
}

Log notes_of(const Log& log) {
  Log notes;
  std::ranges::copy_if(log, std::back_inserter(notes), [](const std::string& line) {
    return line.starts_with("all_gather unit") || line.starts_with("unshard unit") ||
           line.starts_with("reshard unit");
  });
  return notes;
}

TEST_SHARDED(ForwardPrefetch, FollowsTheOrderOfTheLastForward, 2) {
  const auto streams = record(model);
  EXPECT_EQ(notes_of(log_of_forward(model, rank, *streams)),
            notes({"+0 =0 -0", "+1 =1 -1", "+2 =2 -2"}));
  for (int step = 0; step < 2; ++step) {
    EXPECT_EQ(notes_of(log_of_forward(model, rank, *streams)),
              notes({"+0 =0 +1 -0", "=1 +2 -1", "=2 -2"}));
  }
}

// The gather of block 2 waits for block 0's forward, because the gather reuses block 0's memory.
TEST_SHARDED(ForwardPrefetch, WaitsOnlyForReusedMemory, 2) {
  const auto streams = record(model);
  log_of_forward(model, rank, *streams);
  const Log log = log_of_forward(model, rank, *streams);
  // The gather of block 1 does not wait, because the gather allocates new memory.
  EXPECT_EQ(between(log, "all_gather unit 'block1'", "reshard unit 'block0'"),
            (Log{"all_gather unit 'block1'", "enter all_gather", "leave"}));
  const Log left = between(log, "reshard unit 'block0'", "unshard unit 'block1'");
  ASSERT_EQ(left.size(), 2u);
  EXPECT_TRUE(left[1].starts_with("compute: record ")) << left[1];
  EXPECT_EQ(between(log, "all_gather unit 'block2'", "reshard unit 'block1'"),
            (Log{"all_gather unit 'block2'", "enter all_gather",
                 "all_gather: wait " + number_in(left[1]), "leave"}));
}

struct InAnyOrder : nn::Module<InAnyOrder> {
  explicit InAnyOrder(const DeviceMesh& mesh) {
    for (int i = 0; i < 3; ++i) {
      layers.push_back(
          register_module("block" + std::to_string(i), std::make_shared<nn::Linear>(6, 6)));
    }
    testing::fill(*this);
    for (const auto& layer : layers) {
      fully_shard(*layer, mesh);
    }
    fully_shard(*this, mesh);
  }
  at::Tensor forward(at::Tensor x, const std::vector<int>& order) {
    for (const int layer : order) {
      x = (*layers[static_cast<std::size_t>(layer)])(x);
    }
    return x;
  }
  std::vector<std::shared_ptr<nn::Linear>> layers;
};

bool all_sharded(const InAnyOrder& model) {
  return std::ranges::none_of(model.layers, [](const auto& layer) {
    Unit& unit = *layer->template attached<Unit>();
    return unit.unsharded() || unit.any(&GatheredState::is_gathering);
  });
}

TEST_ON_RANKS(ForwardPrefetch, StopsAtAChangedOrderAndFreesUnusedUnits, 2) {
  InAnyOrder model(rank.mesh({2}, {"dp"}));
  const auto streams = record(model);
  const at::Tensor x = uniform_values({2, 6}, 1);
  const c10::AutoGradMode no_grad(false);
  const auto run = [&](const std::vector<int>& order) {
    streams->clear();
    model(x, order);
    EXPECT_TRUE(all_sharded(model));
    return notes_of(streams->log());
  };
  run({0, 1, 2});
  EXPECT_EQ(run({0, 2, 1}), notes({"+0 =0 +1 -0", "+2 =2 -2", "=1 -1"}));
  EXPECT_EQ(run({0, 2}), notes({"+0 =0 +2 -0", "=2 +1 -2"}));
  // The forward calls layer 0 twice, so layer 0 is gathered twice.
  run({0, 1, 0, 2});
  EXPECT_EQ(run({0, 1, 0, 2}), notes({"+0 =0 +1 -0", "=1 +0 -1", "=0 +2 -0", "=2 -2"}));
}

// Only one of two ranks runs a unit that needs no gather. The gathers of all other units must
// nevertheless have the same order on both ranks.
TEST_ON_RANKS(ForwardPrefetch, HasTheSameOrderOnAllRanks, 2) {
  InAnyOrder model(rank.mesh({2}, {"dp"}));
  const at::Tensor x = uniform_values({2, 6}, 1);
  const c10::AutoGradMode no_grad(false);
  {
    const UnshardScope unsharded(*model.layers[1]);
    model(x, rank.rank() == 0 ? std::vector{0, 1, 2} : std::vector{0, 2});
  }
  EXPECT_NO_THROW(model(x, std::vector{0, 1, 2}));
  EXPECT_TRUE(all_sharded(model));
}

}  // namespace tessera::fsdp::streams
