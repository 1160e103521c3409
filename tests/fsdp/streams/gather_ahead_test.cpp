// Forward gathers the next unit while it computes with this one, in the order of the last forward.
// The streams only record.

#include <algorithm>

#include "fsdp/training/training.h"
#include "recording_streams.h"

namespace tessera::fsdp {
namespace {

using testing::record;
using Log = std::vector<std::string>;

/// A forward's log, up to its end.
Log log_of_forward(SmallModel& model, const Rank& rank, testing::RecordingStreams& streams) {
  streams.clear();
  const at::Tensor loss = local_loss(model, rank);
  Log log = streams.log();
  loss.backward();
  return log;
}

/// What is logged from `first` on, up to `last`.
Log between(const Log& log, const std::string& first, const std::string& last) {
  const auto begin = std::ranges::find(log, first);
  const auto end = std::find(begin, log.end(), last);
  EXPECT_NE(end, log.end()) << first << " ... " << last;
  return {begin, end};
}

/// "compute: record 7" -> "7"
std::string number_in(const std::string& line) {
  return line.substr(line.rfind(' ') + 1);
}

Log notes_of(const Log& log) {
  Log notes;
  std::ranges::copy_if(log, std::back_inserter(notes), [](const std::string& line) {
    return line.starts_with("all_gather unit") || line.starts_with("unshard unit") ||
           line.starts_with("reshard unit");
  });
  return notes;
}

TEST(GatherAhead, FollowsTheLastForward) {
  RunSharded(2, [](Rank& rank, ShardedModel& model) {
    const auto streams = record(model);
    const Log first = notes_of(log_of_forward(model, rank, *streams));
    EXPECT_EQ(first,
              (Log{"all_gather unit 'block0'", "unshard unit 'block0'",
                   "reshard unit 'block0'",  //
                   "all_gather unit 'block1'", "unshard unit 'block1'",
                   "reshard unit 'block1'",  //
                   "all_gather unit 'block2'", "unshard unit 'block2'", "reshard unit 'block2'"}));
    for (int step = 0; step < 2; ++step) {
      EXPECT_EQ(notes_of(log_of_forward(model, rank, *streams)),
                (Log{"all_gather unit 'block0'", "unshard unit 'block0'",
                     "all_gather unit 'block1'", "reshard unit 'block0'",
                     "unshard unit 'block1'",  //
                     "all_gather unit 'block2'", "reshard unit 'block1'", "unshard unit 'block2'",
                     "reshard unit 'block2'"}));
    }
  });
}

// The unit before has left its memory, with the end of its forward.
TEST(GatherAhead, WaitsForTheMemoryThatItTakesAlone) {
  RunSharded(2, [](Rank& rank, ShardedModel& model) {
    const auto streams = record(model);
    log_of_forward(model, rank, *streams);
    const Log log = log_of_forward(model, rank, *streams);
    // In newly allocated memory, before any has been freed.
    EXPECT_EQ(between(log, "all_gather unit 'block1'", "reshard unit 'block0'"),
              (Log{"all_gather unit 'block1'", "enter all_gather", "leave"}));
    const Log left = between(log, "reshard unit 'block0'", "unshard unit 'block1'");
    ASSERT_EQ(left.size(), 2u);
    EXPECT_TRUE(left[1].starts_with("compute: record ")) << left[1];
    EXPECT_EQ(between(log, "all_gather unit 'block2'", "reshard unit 'block1'"),
              (Log{"all_gather unit 'block2'", "enter all_gather",
                   "all_gather: wait " + number_in(left[1]), "leave"}));
  });
}

// Compute unpacks into separate memory; the buffer is free as soon as it has done so.
TEST(GatherAhead, WaitsOnlyForTheUnpackingOfPackedUnits) {
  RunRanks(2, [](Rank& rank) {
    ShardedModel model(rank.mesh({2}, {"dp"}),
                       {.shard_placement = [](const std::string&, const at::Tensor& parameter) {
                         return std::optional<Placement>(Shard{parameter.dim() - 1});
                       }});
    const auto streams = record(model);
    log_of_forward(model, rank, *streams);
    const Log log = log_of_forward(model, rank, *streams);
    const Log unpacked = between(log, "unshard unit 'block1'", "all_gather unit 'block2'");
    const std::string event = number_in(unpacked.back());
    EXPECT_EQ(unpacked.back(), "compute: record " + event);
    EXPECT_EQ(between(log, "all_gather unit 'block2'", "reshard unit 'block1'"),
              (Log{"all_gather unit 'block2'", "enter all_gather", "all_gather: wait " + event,
                   "leave"}));
    EXPECT_EQ(between(log, "reshard unit 'block1'", "unshard unit 'block2'"),
              Log{"reshard unit 'block1'"});
  });
}

/// Calls two layers in the order that is asked for.
struct InAnyOrder : nn::Module<InAnyOrder> {
  explicit InAnyOrder(const DeviceMesh& mesh) {
    for (const char* name : {"a", "b", "c"}) {
      layers.push_back(register_module(name, std::make_shared<nn::Linear>(6, 6)));
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

/// Whether nothing is gathered that has not run.
bool all_sharded(const InAnyOrder& model) {
  return std::ranges::none_of(model.layers, [](const auto& layer) {
    Unit& unit = *layer->template attached<Unit>();
    return unit.unsharded() || unit.parameters().any(&GatheredState::is_gathering);
  });
}

TEST(GatherAhead, EndsWhereTheOrderChangesAndFreesWhatWasNotUsed) {
  RunRanks(2, [](Rank& rank) {
    InAnyOrder model(rank.mesh({2}, {"dp"}));
    const auto streams = record(model);
    const at::Tensor x = testing::uniform_values({2, 6}, 1);
    const c10::AutoGradMode no_grad(false);
    const auto notes = [&](const std::vector<int>& order) {
      streams->clear();
      model(x, order);
      EXPECT_TRUE(all_sharded(model));
      return notes_of(streams->log());
    };
    notes({0, 1, 2});
    EXPECT_EQ(notes({0, 2, 1}),
              (Log{"all_gather unit 'a'", "unshard unit 'a'", "all_gather unit 'b'",
                   "reshard unit 'a'",  //
                   "all_gather unit 'c'", "unshard unit 'c'", "reshard unit 'c'",
                   "unshard unit 'b'", "reshard unit 'b'"}));
    // This call does not use the unit gathered last.
    EXPECT_EQ(notes({0, 2}), (Log{"all_gather unit 'a'", "unshard unit 'a'", "all_gather unit 'c'",
                                  "reshard unit 'a'",  //
                                  "unshard unit 'c'", "all_gather unit 'b'", "reshard unit 'c'"}));
    // Positions: a unit may come again.
    notes({0, 1, 0, 2});
    EXPECT_EQ(notes({0, 1, 0, 2}),
              (Log{"all_gather unit 'a'", "unshard unit 'a'", "all_gather unit 'b'",
                   "reshard unit 'a'",  //
                   "unshard unit 'b'", "all_gather unit 'a'", "reshard unit 'b'",
                   "unshard unit 'a'", "all_gather unit 'c'", "reshard unit 'a'",  //
                   "unshard unit 'c'", "reshard unit 'c'"}));
  });
}

// What is unsharded may run on one rank alone; what is gathered ahead must not depend on that.
TEST(GatherAhead, IsTheSameOnRanksThatRunUnshardedUnitsDifferently) {
  RunRanks(2, [](Rank& rank) {
    InAnyOrder model(rank.mesh({2}, {"dp"}));
    const at::Tensor x = testing::uniform_values({2, 6}, 1);
    const c10::AutoGradMode no_grad(false);
    {
      const UnshardScope unsharded(*model.layers[1]);
      model(x, rank.rank() == 0 ? std::vector{0, 1, 2} : std::vector{0, 2});
    }
    EXPECT_NO_THROW(model(x, std::vector{0, 1, 2}));
    EXPECT_TRUE(all_sharded(model));
  });
}

TEST(GatherAhead, AlsoGathersForTheNextMicroBatch) {
  RunSharded(2, [](Rank& rank, ShardedModel& model) {
    const auto streams = record(model);
    set_reshard_after_backward(model, false);
    log_of_forward(model, rank, *streams);
    // Nothing is gathered here, which says nothing of the order.
    EXPECT_EQ(notes_of(log_of_forward(model, rank, *streams)).size(), 3u);
    reshard(model);
    for (const auto& block : model.blocks) {
      reshard(*block);
    }
    const Log log = log_of_forward(model, rank, *streams);
    EXPECT_LT(std::ranges::find(log, "all_gather unit 'block1'"),
              std::ranges::find(log, "reshard unit 'block0'"));
  });
}

}  // namespace
}  // namespace tessera::fsdp
