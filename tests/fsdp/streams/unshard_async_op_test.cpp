// Gathers in the compute lane. The streams only record.

#include <algorithm>

#include "fsdp/training/training.h"
#include "fsdp/unit.h"
#include "recording_streams.h"

namespace tessera::fsdp {
namespace {

using testing::record;
using testing::RecordingStreams;
using Log = std::vector<std::string>;

bool is_of_gather_lane(const std::string& line) {
  return line.starts_with("all_gather: ") || line == "enter all_gather";
}

/// Each block begins to gather the next.
void prefetch(testing::SmallModel& model) {
  set_forward_prefetch(model, {model.blocks[0].get()});
  for (std::size_t i = 0; i + 1 < model.blocks.size(); ++i) {
    set_forward_prefetch(*model.blocks[i], {model.blocks[i + 1].get()});
  }
}

struct Trained {
  std::vector<at::Tensor> tensors;  ///< gradients and parameters
  Log log;
};

/// Two micro-batches and a step, twice.
Trained train(const Arrangement& c, const Rank& rank, bool async_op) {
  ShardedModel model(rank.mesh(c.sizes, c.names), c.options);
  const auto streams = record(model);
  set_unshard_async_op(model, async_op);
  prefetch(model);
  Trained trained;
  for (int step = 0; step < 2; ++step) {
    for (const int half : {0, 1}) {
      local_loss(model, rank, 2 * step + half).backward();
    }
    for (const auto& [name, slot] : model.named_slots()) {
      trained.tensors.push_back(testing::full_tensor(slot->persistent().grad()).clone());
    }
    testing::descend(model, 0.1);
  }
  for (const auto& [name, slot] : model.named_slots()) {
    trained.tensors.push_back(testing::full_tensor(slot->persistent()).clone());
  }
  trained.log = streams->log();
  return trained;
}

class AsyncOp : public ::testing::TestWithParam<Arrangement> {};

TEST_P(AsyncOp, GathersTheSameWithoutALane) {
  const Arrangement& c = GetParam();
  RunRanks(static_cast<int>(c10::multiply_integers(c.sizes)), [&](Rank& rank) {
    const Trained with = train(c, rank, true), without = train(c, rank, false);
    EXPECT_EQ(std::ranges::count_if(with.log, is_of_gather_lane), 0);
    EXPECT_GT(std::ranges::count_if(without.log, is_of_gather_lane), 0);
    ASSERT_EQ(with.tensors.size(), without.tensors.size());
    for (std::size_t i = 0; i < with.tensors.size(); ++i) {
      EXPECT_TRUE(with.tensors[i].equal(without.tensors[i])) << i;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Modes, AsyncOp,
    ::testing::Values(Arrangement{"Plain", {3}, {"dp"}},
                      Arrangement{"Hsdp", {2, 2}, {"replicate", "shard"}},
                      Arrangement{"Neighbours", {4}, {"dp"}, {.post_forward_mesh_size = 2}},
                      Arrangement{"Columns",
                                  {3},
                                  {"dp"},
                                  {.shard_placement =
                                       [](const std::string&, const at::Tensor& tensor) {
                                         return std::optional<Placement>(Shard{tensor.dim() - 1});
                                       }}},
                      Arrangement{
                          "Bf16", {4}, {"dp"}, {.mp_policy = {.param_dtype = at::kBFloat16}}},
                      Arrangement{"Offloaded", {3}, {"dp"}, {.offload_policy = OffloadPolicy{}}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(AsyncOps, BeginWherePrefetchSaysAndEndWhereParametersAreUsed) {
  RunSharded(3, [](Rank& rank, ShardedModel& model) {
    const auto streams = record(model);
    set_unshard_async_op(model, true);
    prefetch(model);
    const c10::AutoGradMode no_grad(false);
    local_loss(model, rank);
    const Log& log = streams->log();
    const auto first = std::ranges::find(log, "all_gather the root unit");
    // Packed or not, each is begun and waited for in the compute lane, with the next in between.
    EXPECT_EQ(Log(first, first + 3), (Log{"all_gather the root unit", "enter compute", "leave"}));
    const auto next = std::ranges::find(log, "all_gather unit 'block1'");
    const auto wait = std::ranges::find(log, "unshard unit 'block0'");
    EXPECT_LT(wait, next);
    EXPECT_LT(next, std::ranges::find(log, "reshard unit 'block0'"));
    EXPECT_EQ(Log(wait, wait + 3), (Log{"unshard unit 'block0'", "enter compute", "leave"}));
  });
}

/// What is written in the compute lane comes before a gather that leaves it again.
TEST(AsyncOps, ComeBeforeALaterGatherInALane) {
  RunRanks(4, [](Rank& rank) {
    ShardedModel model(rank.mesh({4}, {"dp"}), {.post_forward_mesh_size = 2});
    const auto streams = record(model);
    set_unshard_async_op(model, true);
    const at::Tensor loss = local_loss(model, rank);
    set_unshard_async_op(model, false);
    streams->clear();
    loss.backward();
    const Log& log = streams->log();
    const auto gather = std::ranges::find(log, "all_gather unit 'block2'");
    ASSERT_NE(gather, log.end());
    ASSERT_TRUE((gather + 1)->starts_with("compute: record ")) << *(gather + 1);
    EXPECT_EQ(*(gather + 2), "all_gather: wait " + (gather + 1)->substr(16));
    EXPECT_EQ(*(gather + 3), "enter all_gather");
    testing::expect_gradients(model, testing::gradients_alone());
  });
}

TEST(AsyncOps, WaitForTheOptimizersEventAsWell) {
  RunSharded(3, [](Rank& rank, ShardedModel& model) {
    const auto streams = record(model);
    set_unshard_async_op(model, true);
    local_loss(model, rank).backward();
    const auto event = streams->record(comm::Lane::kReduceScatter);  // an optimizer elsewhere
    set_post_optim_event(model, event);
    const std::string number =
        std::to_string(static_cast<const RecordingStreams::Event&>(*event).number);
    streams->clear();
    local_loss(model, rank);
    EXPECT_EQ(streams->log().front(), "compute: wait " + number);
  });
}

TEST(AsyncOps, NeedNoLaneForExplicitGathers) {
  RunSharded(3, [](Rank& rank, ShardedModel& model) {
    const auto streams = record(model);
    set_unshard_async_op(model, true);
    local_loss(model, rank).backward();
    unshard(*model.blocks[1]);
    start_unshard(*model.blocks[0]).wait();
    const UnshardScope unsharded(*model.blocks[2]);
    EXPECT_EQ(std::ranges::count_if(streams->log(), is_of_gather_lane), 0);
  });
}

TEST(AsyncOps, AreSetForEachUnit) {
  nn::Linear linear(3, 5);
  EXPECT_ERROR(set_unshard_async_op(linear, true), "set_unshard_async_op");
}

}  // namespace
}  // namespace tessera::fsdp
