// Hooks on reduced gradients that run in a separate lane. The streams only record.

#include <algorithm>

#include "fsdp/training/training.h"
#include "fsdp/unit/unit.h"
#include "recording_streams.h"
#include "tessera/fsdp/collectives.h"

namespace tessera::fsdp {
namespace {

using comm::Lane;
using testing::record;
using Log = std::vector<std::string>;

/// What a step of a linear layer with such a hook logs from its reduction on.
Log reduction_of_linear(int ranks) {
  Log log;
  RunRanks(ranks, [&](Rank& rank) {
    Filled<nn::Linear> linear(3, 7, {.bias = false});
    fully_shard(linear, rank.mesh({ranks}, {"dp"}));
    const auto streams = record(linear);
    set_all_reduce_hook(
        linear, [&](const at::Tensor&) { streams->note("hook"); }, Lane::kAllReduce);
    linear(testing::uniform_values({2, 3}, 1)).sum().backward();
    if (rank.rank() == 0) {
      log = streams->log();
    }
  });
  log.erase(log.begin(), std::ranges::find(log, "reduce_scatter the root unit"));
  return log;
}

TEST(HookLane, ComesAfterTheReductionAndBeforeGradientsAreUsed) {
  EXPECT_EQ(reduction_of_linear(3),
            (Log{"reduce_scatter the root unit", "compute: record 5", "reduce_scatter: wait 5",
                 "enter reduce_scatter", "leave",
                 // Finished:
                 "enter reduce_scatter", "reduce_scatter: record 6", "leave",
                 // Completed:
                 "enter all_reduce", "reduce_scatter: record 7", "all_reduce: wait 7", "hook",
                 "all_reduce: record 8", "leave",
                 // Settled: for the optimizer, and before the memory is freed.
                 "reduce_scatter: wait 8", "reduce_scatter: record 9", "compute: wait 9",
                 "compute: wait 6"}));
}

TEST(HookLane, ComputesTheGradientsOfOneRank) {
  Log log;
  RunRanks(1, [&](Rank& rank) {
    Filled<nn::Linear> linear(3, 4, {.bias = false});
    fully_shard(linear, rank.mesh({1}, {"dp"}));
    const auto streams = record(linear);
    set_all_reduce_hook(
        linear, [&](const at::Tensor&) { streams->note("hook"); }, Lane::kAllReduce);
    linear(testing::uniform_values({2, 3}, 1)).sum().backward();
    log = streams->log();
  });
  log.erase(log.begin(), std::ranges::find(log, "enter all_reduce"));
  const Log hook(log.begin(), log.begin() + 7);
  EXPECT_EQ(hook, (Log{"enter all_reduce", "compute: record 3", "all_reduce: wait 3", "hook",
                       "all_reduce: record 4", "leave", "compute: wait 4"}));
}

TEST(HookLane, RunsBesideTheNextReduction) {
  RunSharded(3, [](Rank& rank, ShardedModel& model) {
    const auto streams = record(model);
    set_all_reduce_hook(model, [](const at::Tensor&) {}, Lane::kAllReduce);
    local_loss(model, rank).backward();
    const Log& log = streams->log();
    int hooks = 0, beside = 0;
    for (auto line = log.begin(); line != log.end(); ++line) {
      const std::string recorded = "all_reduce: record ";
      if (!line->starts_with(recorded)) {
        continue;
      }
      const auto joined =
          std::find(line, log.end(), "reduce_scatter: wait " + line->substr(recorded.size()));
      ASSERT_NE(joined, log.end());
      ++hooks;
      beside += static_cast<int>(std::count_if(line, joined, [](const std::string& between) {
        return between.starts_with("reduce_scatter unit") ||
               between.starts_with("reduce_scatter the root unit");
      }));
    }
    EXPECT_EQ(hooks, 4);
    EXPECT_EQ(beside, 3);  // one for each hook but the last
  });
}

TEST(HookLane, KeepsReducedGradientsUntilTheHookIsDone) {
  RunSharded(3, [](Rank& rank, ShardedModel& model) {
    record(model);
    using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
    std::vector<Weak> hooked;
    int checked = 0;
    set_all_reduce_hook(
        model,
        [&](const at::Tensor& gradients) {
          hooked.emplace_back(gradients.storage().getWeakStorageImpl());
        },
        Lane::kAllReduce);
    set_custom_reduce_scatter(model, [&](auto& group, const auto& output, const auto& input) {
      if (!hooked.empty()) {
        EXPECT_FALSE(hooked.back().expired());
        ++checked;
      }
      return group.reduce_scatter(output, input, ReduceOp::kSum);
    });
    local_loss(model, rank).backward();
    hooked.clear();
    checked = 0;
    local_loss(model, rank).backward();  // is added to the gradients that are there
    EXPECT_EQ(checked, 3);
    for (const Weak& storage : hooked) {
      EXPECT_TRUE(storage.expired());
    }
  });
}

class HookLaneOf : public ::testing::TestWithParam<int> {};

TEST_P(HookLaneOf, GivesTheGradientsThatTheHookMakes) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1});
  RunSharded(GetParam(), [&](Rank& rank, ShardedModel& model) {
    set_all_reduce_hook(
        model, [](const at::Tensor& gradients) { gradients.mul_(3); }, Lane::kAllReduce);
    for (const int step : {0, 1}) {
      local_loss(model, rank, step).backward();
    }
    testing::expect_gradients(model, expected, 3);
    // Without a lane again, and without a hook.
    set_all_reduce_hook(model, [](const at::Tensor& gradients) { gradients.mul_(3); });
    for (const int step : {0, 1}) {
      local_loss(model, rank, step).backward();
    }
    testing::expect_gradients(model, expected, 6);
    set_all_reduce_hook(model, {}, Lane::kAllReduce);
    for (const int step : {0, 1}) {
      local_loss(model, rank, step).backward();
    }
    testing::expect_gradients(model, expected, 7);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, HookLaneOf, ::testing::Values(1, 3, 4));

TEST(HookLane, ServesRanksThatAllShard) {
  const std::vector<at::Tensor> expected = gradients_alone();
  RunRanks(4, [&](Rank& rank) {
    ShardedModel model(rank.mesh({2, 2}, {"replicate", "shard"}), {.shard_over_replicas = true});
    set_all_reduce_hook(
        model, [](const at::Tensor& gradients) { gradients.mul_(3); }, Lane::kAllReduce);
    local_loss(model, rank).backward();
    testing::expect_gradients(model, expected, 3);
  });
}

TEST(HookLane, IsRefusedWhereReplicasAreSummed) {
  RunOnMesh({2, 2}, {"replicate", "shard"}, [](const DeviceMesh& mesh) {
    nn::Linear sharded(3, 5), replicated(3, 5);
    fully_shard(sharded, mesh);
    replicate(replicated, mesh.flatten("dp"));
    for (nn::Linear* linear : {&sharded, &replicated}) {
      const auto set = [&] {
        set_all_reduce_hook(*linear, [](const at::Tensor&) {}, Lane::kAllReduce);
      };
      EXPECT_ERROR(set(), "replicas");
      EXPECT_FALSE(linear->attached<Unit>()->settings().hooks.all_reduce);
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp
