// HSDP: one mesh dimension that replicates, one that shards.

#include "fsdp/training/training.h"

namespace tessera::fsdp {
namespace {

class Hybrid : public ::testing::TestWithParam<std::pair<std::int64_t, std::int64_t>> {};

TEST_P(Hybrid, AveragesOverReplicasToo) {
  const auto [replicas, shards] = GetParam();
  const std::vector<at::Tensor> expected = gradients_alone();
  RunRanks(static_cast<int>(replicas * shards), [&, r = replicas, s = shards](Rank& rank) {
    ShardedModel model(rank.mesh({r, s}, {"replicate", "shard"}));
    const comm::TrafficTable before = rank.world()->traffic().table();
    local_loss(model, rank).backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    EXPECT_EQ(traffic_of(traffic, "replicate", "all_reduce").calls, r > 1 ? 4 : 0);
    EXPECT_EQ(traffic_of(traffic, "shard", "reduce_scatter").calls, s > 1 ? 4 : 0);
    expect_gradients(model, expected);
    const Placements lie = DistributedTensor(model.head->slot("weight")->persistent()).placements();
    EXPECT_EQ(lie, (Placements{Replicate{}, Shard{0}}));
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, Hybrid,
                         ::testing::Values(std::pair{2, 2}, std::pair{3, 1}, std::pair{1, 3},
                                           std::pair{2, 3}));

/// Two layers; a micro-batch uses one of them.
struct Either : nn::Module<Either> {
  at::Tensor forward(const at::Tensor& x, bool first) { return (first ? *a : *b)(x); }

  nn::Child<nn::Linear> a{*this, "a", 3, 3}, b{*this, "b", 3, 3};
};

// PyTorch adds the flat sum of one set of parameters to that of another.
TEST(Replicas, ReduceMicroBatchesThatUseDifferentParameters) {
  const at::Tensor x = testing::uniform_values({8, 3}, 3);
  Filled<Either> alone;
  alone(x, true).sum().add(alone(x, false).square().sum()).div(4).backward();
  RunRanks(4, [&](Rank& rank) {
    Filled<Either> model;
    fully_shard(model, rank.mesh({2, 2}, {"replicate", "shard"}));
    const at::Tensor rows = x.narrow(0, 2 * rank.rank(), 2);
    const comm::TrafficTable before = rank.world()->traffic().table();
    set_requires_all_reduce(model, false);
    model(rows, true).sum().backward();
    EXPECT_ERROR(model.a->slot("weight")->persistent().grad().sum(), "is not reduced");
    set_requires_all_reduce(model, true);
    model(rows, false).square().sum().backward();
    const comm::TrafficTable traffic = rank.world()->traffic().since(before);
    EXPECT_EQ(traffic_of(traffic, "replicate", "all_reduce").calls, 1);
    EXPECT_EQ(traffic_of(traffic, "shard", "reduce_scatter").calls, 2);
    expect_gradients(model, testing::gradients_of(alone));
  });
}

TEST(Replicas, AddUpSeveralMicroBatchesBeforeOneAllReduce) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1, 2});
  RunRanks(4, [&](Rank& rank) {
    ShardedModel model(rank.mesh({2, 2}, {"replicate", "shard"}));
    set_requires_all_reduce(model, false);
    local_loss(model, rank, 0).backward();
    local_loss(model, rank, 1).backward();
    set_requires_all_reduce(model, true);
    local_loss(model, rank, 2).backward();
    expect_gradients(model, expected);
  });
}

TEST(Replicas, KeepPendingGradientsIfAParameterIsFrozenInBetween) {
  RunRanks(4, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 4, {.bias = false});
    fully_shard(linear, rank.mesh({2, 2}, {"replicate", "shard"}));
    const nn::SlotPtr slot = linear.slot("weight");
    set_requires_all_reduce(linear, false);
    const at::Tensor x = at::ones({1, 3}).requires_grad_();
    linear(x).sum().backward();
    slot->persistent().set_requires_grad(false);
    set_requires_all_reduce(linear, true);
    linear(x).sum().backward();
    EXPECT_TRUE(full_tensor(slot->persistent().grad()).equal(at::ones({4, 3})));
  });
}

// In fp16 half of the division comes before the sum, and what waits has it.
TEST(Replicas, AddUpMicroBatchesThatAreDividedDifferently) {
  const auto gradient_after = [](Rank& rank, const std::function<void(nn::Linear&)>& change) {
    nn::Linear linear(4, 4, {.bias = false});
    testing::fill(linear);
    linear.to(at::kHalf);
    fully_shard(linear, rank.mesh({2, 2}, {"replicate", "shard"}));
    const auto backward = [&] {
      linear(at::ones({1, 4}, linear.slot("weight")->persistent().scalar_type())).sum().backward();
    };
    set_requires_all_reduce(linear, false);
    backward();
    set_requires_all_reduce(linear, true);
    change(linear);
    backward();
    return full_tensor(linear.slot("weight")->persistent().grad()).to(at::kFloat);
  };
  RunRanks(4, [&](Rank& rank) {
    const auto expect = [&](double value, const std::function<void(nn::Linear&)>& change) {
      EXPECT_TRUE(gradient_after(rank, change).equal(at::full({4, 4}, value)));
    };
    expect(2, [](nn::Linear&) {});
    expect(2, [](nn::Linear& linear) { set_force_sum_reduction(linear, true); });
    expect(8, [](nn::Linear& linear) { set_gradient_divide_factor(linear, 1); });
    expect(2, [](nn::Linear& linear) { linear.to(at::kFloat); });
  });
}

}  // namespace
}  // namespace tessera::fsdp
