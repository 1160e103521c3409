// Replicas of shards (HSDP), of whole parameters (replicate), and the mesh of a world.

#include "fsdp/training/training.h"
#include "tessera/fsdp/wrap_policy.h"

namespace tessera::fsdp::replicas {

TEST(Replicas, AverageOverAllRanks) {
  const std::vector<at::Tensor> expected = gradients_alone();
  for (const auto& [replicas, shards] : {std::pair{2, 2}, {3, 1}, {1, 3}, {2, 3}}) {
    RunArranged({"", {replicas, shards}, {"replicate", "shard"}},
                [&, r = replicas, s = shards](Rank& rank, ShardedModel& model) {
                  const Sent sent(rank);
                  local_loss(model, rank).backward();
                  EXPECT_EQ(sent.calls("replicate", "all_reduce"), r > 1 ? 4 : 0);
                  EXPECT_EQ(sent.calls("shard", "reduce_scatter"), s > 1 ? 4 : 0);
                  expect_gradients(model, expected);
                  EXPECT_EQ(
                      DistributedTensor(model.head->slot("weight")->persistent()).placements(),
                      (Placements{Replicate{}, Shard{0}}));
                });
  }
}

/// Two layers. A micro-batch uses one of them.
struct Either : nn::Module<Either> {
  at::Tensor forward(const at::Tensor& x, bool first) { return (first ? *a : *b)(x); }
  nn::Child<nn::Linear> a{*this, "a", 3, 3}, b{*this, "b", 3, 3};
};

// PyTorch adds the flat sums of different sets of parameters.
TEST(Replicas, ReduceMicroBatchesThatUseDifferentParameters) {
  const at::Tensor x = uniform_values({8, 3}, 3);
  Filled<Either> alone;
  alone(x, true).sum().add(alone(x, false).square().sum()).div(4).backward();
  RunRanks(4, [&](Rank& rank) {
    Filled<Either> model;
    fully_shard(model, rank.mesh({2, 2}, {"replicate", "shard"}));
    const at::Tensor rows = x.narrow(0, 2 * rank.rank(), 2);
    const Sent sent(rank);
    set_requires_all_reduce(model, false);
    model(rows, true).sum().backward();
    EXPECT_ERROR(model.a->slot("weight")->persistent().grad().sum(), "is not reduced");
    set_requires_all_reduce(model, true);
    model(rows, false).square().sum().backward();
    EXPECT_EQ(sent.calls("replicate", "all_reduce"), 1);
    EXPECT_EQ(sent.calls("shard", "reduce_scatter"), 2);
    expect_gradients(model, gradients_of(alone));
  });
}

// In fp16 half of the division comes before the sum, so that waiting gradients are partly divided.
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
    return full_grad(linear).to(at::kFloat);
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

constexpr std::int64_t kBlock =
    testing::packed_numel({kHidden * kDim, kHidden, kDim* kHidden, kDim});
constexpr std::int64_t kHead = testing::packed_numel({kClasses * kDim, kClasses});

void replicate_all(SmallModel& model, const DeviceMesh& mesh, const Options& options = {}) {
  for (const auto& block : model.blocks) {
    replicate(*block, mesh, options);
  }
  replicate(model, mesh, options);
}

TEST(Replicate, TrainsAsOneRankDoesWithOneAllReduceAUnit) {
  const testing::Training expected = testing::train_alone({}, 3);
  for (const int ranks : {1, 3, 4}) {
    RunOnMesh({ranks}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
      Filled<SmallModel> model(kDim, kHidden, kClasses);
      replicate_all(model, mesh);
      testing::expect_training(model, rank, expected);
      EXPECT_EQ(DistributedTensor(model.head->slot("weight")->persistent()).placements(),
                Placements{Replicate{}});
      const Sent sent(rank);
      local_loss(model, rank).backward();
      EXPECT_EQ(sent.table().size(), ranks > 1 ? 1u : 0u);
      EXPECT_EQ(sent.calls("dp", "all_reduce"), ranks > 1 ? 4 : 0);
      EXPECT_EQ(sent.of("dp", "all_reduce").bytes, ranks > 1 ? 4 * (3 * kBlock + kHead) : 0);
    });
  }
}

TEST_ON_RANKS(Replicate, GathersNoCopy, 2) {
  Filled<nn::Linear> linear(3, 4);
  replicate(linear, rank.mesh({2}, {"dp"}));
  const nn::SlotPtr slot = linear.slot("weight");
  const UnshardScope scope(linear);
  EXPECT_FALSE(tessera::is_distributed(slot->get()));
  EXPECT_EQ(slot->get().const_data_ptr(), local_tensor(slot->persistent()).const_data_ptr());
}

TEST(Replicate, ReducesOnceForSeveralMicroBatches) {
  const std::vector<at::Tensor> expected = gradients_alone({}, {0, 1, 2});
  RunOnMesh({4}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    replicate_all(model, mesh);
    const Sent sent(rank);
    set_requires_gradient_sync(model, false);  // whole gradients are accumulated
    local_loss(model, rank, 0).backward();
    set_requires_gradient_sync(model, true);
    set_requires_all_reduce(model, false);  // their sum is kept for the all-reduce
    local_loss(model, rank, 1).backward();
    EXPECT_ERROR(model.head->slot("weight")->persistent().grad().sum(), "is not reduced");
    set_requires_all_reduce(model, true);
    local_loss(model, rank, 2).backward();
    EXPECT_EQ(sent.calls("dp", "all_reduce"), 4);
    expect_gradients(model, expected);
  });
}

TEST(Replicate, CombinesWithUnitsThatAreSharded) {
  const std::vector<at::Tensor> expected = gradients_alone();
  RunOnMesh({4}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    replicate(*model.blocks[1], mesh);
    fully_shard(model, mesh);
    const Sent sent(rank);
    local_loss(model, rank).backward();
    EXPECT_EQ(sent.of("dp", "all_reduce").bytes, 4 * kBlock);
    EXPECT_EQ(sent.calls("dp", "all_gather"), 1);
    EXPECT_EQ(sent.calls("dp", "reduce_scatter"), 1);
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
      const Sent sent(rank);
      local_loss(model, rank).backward();
      EXPECT_EQ(sent.table().size(), 1u);
      expect_gradients(model, expected);
    }
  });
}

TEST(WorldMesh, IsAMeshOfAllRanks) {
  const testing::Training expected = testing::train_alone({}, 3);
  for (const int ranks : {1, 3, 4}) {
    RunRanks(ranks, [&](Rank& rank) {
      const DeviceMesh mesh = world_mesh(rank.world());
      EXPECT_EQ(mesh, rank.mesh({rank.size()}, {"dp"}));
      EXPECT_EQ(mesh.local_rank(), rank.rank());
      // Units of several modules, replicas and a wrap plan.
      Filled<SmallModel> model(kDim, kHidden, kClasses), planned(kDim, kHidden, kClasses);
      fully_shard({model.blocks[0].get(), model.blocks[1].get()}, mesh);
      replicate(*model.blocks[2], mesh);
      fully_shard(*model.head, rank.mesh({rank.size()}, {"dp"}));
      fully_shard(model, mesh, {.reshard_after_forward = true});
      testing::expect_training(model, rank, expected);
      apply_plan(planned, mesh, plan_units(planned, wrap_class<Block>()));
      EXPECT_TRUE(is_fully_sharded(*planned.blocks[1]));
      testing::expect_training(planned, rank, expected);
    });
  }
}

}  // namespace tessera::fsdp::replicas
