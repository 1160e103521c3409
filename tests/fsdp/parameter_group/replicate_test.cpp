// Data parallelism: whole parameters, gradients all-reduced a unit at a time.

#include "fsdp/training/training.h"

namespace tessera::fsdp {
namespace {

using testing::expect_training;
using testing::Training;

constexpr std::int64_t kBlock =
    testing::packed_numel({kHidden * kDim, kHidden, kDim* kHidden, kDim});
constexpr std::int64_t kHead = testing::packed_numel({kClasses * kDim, kClasses});

void replicate_all(SmallModel& model, const DeviceMesh& mesh, const Options& options = {}) {
  for (const auto& block : model.blocks) {
    replicate(*block, mesh, options);
  }
  replicate(model, mesh, options);
}

class Replication : public ::testing::TestWithParam<int> {};

TEST_P(Replication, TrainsAsOneRankDoes) {
  const Training expected = testing::train_alone({}, 3);
  RunRanks(GetParam(), [&](Rank& rank) {
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    replicate_all(model, rank.mesh({rank.size()}, {"dp"}));
    expect_training(model, rank, expected);
    EXPECT_EQ(DistributedTensor(model.head->slot("weight")->persistent()).placements(),
              Placements{Replicate{}});
  });
}

TEST_P(Replication, SendsOneAllReduceAUnitAndNothingElse) {
  RunRanks(GetParam(), [](Rank& rank) {
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    replicate_all(model, rank.mesh({rank.size()}, {"dp"}));
    const comm::TrafficTable before = rank.world()->traffic().table();
    local_loss(model, rank).backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    EXPECT_EQ(traffic.size(), rank.size() > 1 ? 1u : 0u);
    const comm::Traffic sums = traffic_of(traffic, "dp", "all_reduce");
    EXPECT_EQ(sums.calls, rank.size() > 1 ? 4 : 0);
    EXPECT_EQ(sums.bytes, rank.size() > 1 ? 4 * (3 * kBlock + kHead) : 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Replication, ::testing::Values(1, 3, 4));

TEST(Replicate, UsesTheShardItselfAsTheWholeTensor) {
  RunRanks(2, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 4);
    replicate(linear, rank.mesh({2}, {"dp"}));
    const nn::SlotPtr slot = linear.slot("weight");
    const UnshardScope scope(linear);
    EXPECT_FALSE(tessera::is_distributed(slot->get()));
    EXPECT_EQ(slot->get().const_data_ptr(), local_tensor(slot->persistent()).const_data_ptr());
  });
}

TEST(Replicate, ReducesOnceForSeveralMicroBatches) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1, 2});
  RunRanks(4, [&](Rank& rank) {
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    replicate_all(model, rank.mesh({4}, {"dp"}));
    const comm::TrafficTable before = rank.world()->traffic().table();
    set_requires_gradient_sync(model, false);  // whole gradients wait,
    local_loss(model, rank, 0).backward();
    set_requires_gradient_sync(model, true);
    set_requires_all_reduce(model, false);  // then what the reduction began with
    local_loss(model, rank, 1).backward();
    EXPECT_ERROR(model.head->slot("weight")->persistent().grad().sum(), "is not reduced");
    set_requires_all_reduce(model, true);
    local_loss(model, rank, 2).backward();
    EXPECT_EQ(traffic_of(rank.world()->traffic().since(before), "dp", "all_reduce").calls, 4);
    expect_gradients(model, expected);
  });
}

TEST(Replicate, ComputesInAnotherTypeAndSumsInAThird) {
  RunRanks(4, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 4, {.bias = false});
    const at::Tensor filled = linear.weight->detach().clone();
    replicate(linear, rank.mesh({4}, {"dp"}),
              {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    const at::Tensor out = linear(at::ones({1, 3}));
    EXPECT_EQ(out.scalar_type(), at::kBFloat16);
    out.sum().mul(rank.rank() == 3 ? 1.0 / 512 : 1.0).backward();
    const at::Tensor& weight = linear.slot("weight")->persistent();
    EXPECT_TRUE(full_tensor(weight).equal(filled));
    // In bf16 the last rank's part would be lost.
    EXPECT_TRUE(full_tensor(weight.grad()).equal(at::ones({4, 3}).mul((3 + 1.0 / 512) / 4)));
  });
}

TEST(Replicate, CombinesWithUnitsThatAreSharded) {
  const std::vector<at::Tensor> expected = gradients_alone();
  RunOnMesh({4}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    replicate(*model.blocks[1], mesh);
    fully_shard(model, mesh);
    const comm::TrafficTable before = rank.world()->traffic().table();
    local_loss(model, rank).backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    EXPECT_EQ(traffic_of(traffic, "dp", "all_reduce").bytes, 4 * kBlock);
    EXPECT_EQ(traffic_of(traffic, "dp", "all_gather").calls, 1);
    EXPECT_EQ(traffic_of(traffic, "dp", "reduce_scatter").calls, 1);
    expect_gradients(model, expected);
  });
}

// PyTorch's set_reshard_after_forward breaks on such units.
TEST(Replicate, TakesTheSettingsOfUnitsThatAreSharded) {
  const std::vector<at::Tensor> expected = gradients_alone();
  RunRanks(2, [&](Rank& rank) {
    for (const bool reshard : {true, false}) {
      Filled<SmallModel> model(kDim, kHidden, kClasses);
      replicate_all(model, rank.mesh({2}, {"dp"}));
      set_reshard_after_forward(model, reshard);
      set_reshard_after_backward(model, reshard);
      set_unshard_in_backward(model, reshard, /*recurse=*/true);
      const comm::TrafficTable before = rank.world()->traffic().table();
      local_loss(model, rank).backward();
      EXPECT_EQ(rank.world()->traffic().since(before).size(), 1u);
      expect_gradients(model, expected);
    }
  });
}

TEST(Replicate, RefusesWhatItCannotDo) {
  RunOnMesh({4}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    nn::Linear linear(3, 4);
    EXPECT_ERROR(replicate(linear, rank.mesh({2, 2}, {"a", "b"})),
                 "replicate: the mesh is DeviceMesh((a=2, b=2), cpu)");
    EXPECT_ERROR(replicate(linear, DeviceMesh()), "replicate: the mesh is undefined");
    EXPECT_ERROR(replicate(linear, mesh, {.post_forward_mesh_size = 2}),
                 "the options say how to split parameters");
    EXPECT_FALSE(tessera::is_distributed(linear.weight));
    replicate(linear, mesh);
    EXPECT_ERROR(replicate(linear, mesh), "apply one of them once");
    EXPECT_ERROR(fully_shard(linear, mesh), "apply one of them once");
  });
}

}  // namespace
}  // namespace tessera::fsdp
