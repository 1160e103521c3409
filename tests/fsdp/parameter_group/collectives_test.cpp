// Collectives that the caller brings, and roots that share what they communicate with.
#include "tessera/fsdp/collectives.h"

#include "fsdp/streams/recording_streams.h"
#include "fsdp/training/training.h"
#include "fsdp/unit/unit.h"

namespace tessera::fsdp {
namespace {

class OwnCollectives : public ::testing::TestWithParam<int> {};

TEST_P(OwnCollectives, ReplaceTheCommunicators) {
  const std::vector<at::Tensor> expected = gradients_alone();
  RunSharded(GetParam(), [&](Rank& rank, ShardedModel& model) {
    int gathers = 0, reductions = 0;
    set_custom_all_gather(model, [&](auto& group, const auto& output, const auto& input) {
      ++gathers;
      return group.all_gather(output, input);
    });
    set_custom_reduce_scatter(model, [&](auto& group, const auto& output, const auto& input) {
      ++reductions;
      group.reduce_scatter(output, input, ReduceOp::kSum)->wait();
      return comm::WorkPtr();
    });
    local_loss(model, rank).backward();
    EXPECT_EQ(gathers, rank.size() > 1 ? 7 : 0);
    EXPECT_EQ(reductions, rank.size() > 1 ? 4 : 0);
    expect_gradients(model, expected);
    set_custom_all_gather(model, {});
    set_custom_reduce_scatter(model, {});
    local_loss(model, rank).backward();
    expect_gradients(model, expected, 2);
    EXPECT_EQ(reductions, rank.size() > 1 ? 4 : 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, OwnCollectives, ::testing::Values(1, 2, 4));

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
TEST(OwnCollectivesOfOneUnit, AreSetAsInTheFirstVersion) {
  RunSharded(2, [](Rank& rank, ShardedModel& model) {
    int gathers = 0, reductions = 0;
    const AllGather all_gather = [&](auto& group, const auto& output, const auto& input) {
      ++gathers;
      return group.all_gather(output, input);
    };
    const ReduceScatter reduce_scatter = [&](auto& group, const auto& output, const auto& input) {
      ++reductions;
      return group.reduce_scatter(output, input, ReduceOp::kSum);
    };
    set_custom_all_gather(*model.blocks[0], all_gather, /*recurse=*/false);
    set_custom_reduce_scatter(*model.blocks[0], reduce_scatter, /*recurse=*/false);
    local_loss(model, rank).backward();
    EXPECT_EQ(gathers, 2);  // for forward and for backward
    EXPECT_EQ(reductions, 1);
  });
}
#pragma GCC diagnostic pop

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

TEST(ShareContext, LetsTwoStagesInterleaveMicroBatches) {
  const std::vector<at::Tensor> expected = gradients_alone({4, 6, 4}, {0, 1});
  RunOnMesh({2}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    // The same model cut in two: the blocks, and another that holds the head alone.
    SmallModel first(4, 6, 4), second(4, 6, 4, 0);
    testing::fill(first);
    second.head->slot("weight")->get().detach().copy_(first.head->weight->detach());
    second.head->slot("bias")->get().detach().copy_(first.head->bias->detach());
    shard(first, mesh);
    fully_shard(second, mesh);
    share_context({&first, &second});
    EXPECT_EQ(first.attached<Unit>()->parameters().shared_comm_context(),
              second.attached<Unit>()->parameters().shared_comm_context());
    // One forward, one backward: what one stage gathers and reduces, the other must not lose.
    const at::Tensor a = local_loss(first, rank, 0), b = local_loss(first, rank, 1);
    const at::Tensor other = second(testing::batch(4, 0)).sum();
    a.backward();
    other.backward();
    b.backward();
    expect_gradients(first, expected);
    EXPECT_TRUE(second.head->slot("weight")->persistent().grad().defined());
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

TEST(ShareContext, RefusesAModuleThatIsNoUnit) {
  nn::Linear linear(2, 2);
  EXPECT_ERROR(share_context({&linear}), "share_context: this");
  EXPECT_ERROR(set_all_reduce_hook(linear, {}), "set_all_reduce_hook: this");
}

}  // namespace
}  // namespace tessera::fsdp
