// Exactly what micro-batches send, for every way to accumulate.

#include <tuple>

#include "fsdp/training/training.h"

namespace tessera::fsdp {
namespace {

constexpr int kMicroBatches = 3, kUnits = 4;  // three blocks and the root

/// Which units wait for the last micro-batch.
enum class Waiting { kAll, kRoot, kTwoBlocks };

int units_that_wait(Waiting waiting) {
  return waiting == Waiting::kAll ? kUnits : waiting == Waiting::kRoot ? 1 : 2;
}

using Set = void (*)(nn::ModuleBase&, bool, bool);

void set_waiting(SmallModel& model, Waiting waiting, Set set, bool last) {
  if (waiting == Waiting::kTwoBlocks) {
    for (const int block : {0, 2}) {
      set(*model.blocks[static_cast<std::size_t>(block)], last, false);
    }
  } else {
    set(model, last, waiting == Waiting::kAll);
  }
}

using CountCase = std::tuple<Waiting, bool>;

class AccumulationCounts : public ::testing::TestWithParam<CountCase> {};

comm::TrafficTable accumulate(Rank& rank, SmallModel& model, Waiting waiting, Set set) {
  const comm::TrafficTable before = rank.world()->traffic().table();
  for (int i = 0; i < kMicroBatches; ++i) {
    set_waiting(model, waiting, set, i + 1 == kMicroBatches);
    testing::local_loss(model, rank, i).backward();
  }
  return rank.world()->traffic().since(before);
}

int reductions(Waiting waiting) {
  const int wait = units_that_wait(waiting);
  return wait + kMicroBatches * (kUnits - wait);
}

/// The root stays whole between forward and backward.
int gathers(bool reshard) {
  return kMicroBatches * (reshard ? 2 * (kUnits - 1) + 1 : kUnits);
}

TEST_P(AccumulationCounts, ReduceScattersAndGathersFollowTheSettings) {
  const auto [waiting, reshard] = GetParam();
  const std::vector<at::Tensor> expected = testing::gradients_alone({}, {0, 1, 2});
  RunRanks(2, [&, waiting = waiting, reshard = reshard](Rank& rank) {
    ShardedModel model(rank.mesh({2}, {"dp"}), {.reshard_after_forward = reshard});
    if (reshard) {
      set_reshard_after_forward(model, false, /*recurse=*/false);
    }
    const auto traffic = accumulate(rank, model, waiting, set_requires_gradient_sync);
    EXPECT_EQ(traffic_of(traffic, "dp", "reduce_scatter").calls, reductions(waiting));
    EXPECT_EQ(traffic_of(traffic, "dp", "all_gather").calls, gathers(reshard));
    testing::expect_gradients(model, expected);
  });
}

TEST_P(AccumulationCounts, AllReducesOfReplicasFollowTheSettings) {
  const auto [waiting, reshard] = GetParam();
  const std::vector<at::Tensor> expected = testing::gradients_alone({}, {0, 1, 2});
  RunRanks(4, [&, waiting = waiting, reshard = reshard](Rank& rank) {
    ShardedModel model(rank.mesh({2, 2}, {"replicate", "shard"}),
                       {.reshard_after_forward = reshard});
    if (reshard) {
      set_reshard_after_forward(model, false, /*recurse=*/false);
    }
    const auto traffic = accumulate(rank, model, waiting, set_requires_all_reduce);
    EXPECT_EQ(traffic_of(traffic, "replicate", "all_reduce").calls, reductions(waiting));
    EXPECT_EQ(traffic_of(traffic, "shard", "reduce_scatter").calls, kMicroBatches * kUnits);
    EXPECT_EQ(traffic_of(traffic, "shard", "all_gather").calls, gathers(reshard));
    testing::expect_gradients(model, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, AccumulationCounts,
                         ::testing::Combine(::testing::Values(Waiting::kAll, Waiting::kRoot,
                                                              Waiting::kTwoBlocks),
                                            ::testing::Bool()));

}  // namespace
}  // namespace tessera::fsdp
