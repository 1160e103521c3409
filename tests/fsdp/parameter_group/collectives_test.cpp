// Hooks behind the reductions, and events before the gathers.
#include "fsdp/streams/recording_streams.h"
#include "fsdp/training/training.h"
#include "fsdp/unit.h"

namespace tessera::fsdp {
namespace {

TEST(AllReduceHook, SeesTheReducedGradientsBeforeTheyAreDivided) {
  const std::vector<at::Tensor> expected = gradients_alone();
  for (const int ranks : {1, 3}) {
    RunSharded(ranks, [&](Rank& rank, ShardedModel& model) {
      set_all_reduce_hook(model, [](const at::Tensor& gradients) { gradients.mul_(3); });
      local_loss(model, rank).backward();
      expect_gradients(model, expected, 3);
    });
  }
}

TEST(AllReduceHook, RunsAfterTheReplicasAreSummed) {
  RunRanks(4, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 4, {.bias = false});
    fully_shard(linear, rank.mesh({2, 2}, {"replicate", "shard"}));
    double seen = 0;
    set_all_reduce_hook(
        linear, [&](const at::Tensor& gradients) { seen = gradients.max().item<double>(); });
    linear(testing::uniform_values({1, 3}, 0).mul(0).add(1)).sum().backward();
    EXPECT_EQ(seen, 4.0);
  });
}

TEST(PostOptimEvent, MayBeSetOnTheRootOnly) {
  RunRanks(2, [](Rank& rank) {
    ShardedModel model(rank.mesh({2}, {"dp"}), {}, {4, 6, 2});
    local_loss(model, rank).backward();
    EXPECT_ERROR(set_post_optim_event(*model.blocks[0], nullptr), "is not the root");
    EXPECT_ERROR(set_post_optim_event(*model.blocks[0]->up, nullptr), "set_post_optim_event: this");
  });
}

TEST(AllReduceHook, IsRefusedForAModuleThatIsNoUnit) {
  nn::Linear linear(2, 2);
  EXPECT_ERROR(set_all_reduce_hook(linear, {}), "set_all_reduce_hook: this");
}

}  // namespace
}  // namespace tessera::fsdp
