#include "tessera/fsdp/fully_shard.h"

#include "fsdp/training/training.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/meta_device.h"
#include "testing/module_values.h"

namespace tessera::fsdp {
namespace {

using testing::batch;

class Parity : public ::testing::TestWithParam<std::pair<int, testing::Sizes>> {};

TEST_P(Parity, TrainsAsOneRankDoes) {
  const auto& [ranks, sizes] = GetParam();
  const testing::Training expected = testing::train_alone(sizes, 3);
  RunRanks(ranks, [&, sizes = sizes](Rank& rank) {
    ShardedModel model(rank.mesh({rank.size()}, {"dp"}), {}, sizes);
    testing::expect_training(model, rank, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, Parity,
                         ::testing::Values(std::pair{1, testing::Sizes{6, 10, 3}},
                                           std::pair{2, testing::Sizes{8, 16, 4}},
                                           std::pair{4, testing::Sizes{8, 16, 4}},
                                           std::pair{4, testing::Sizes{7, 30, 5}},
                                           std::pair{3, testing::Sizes{7, 5, 2}},
                                           std::pair{4, testing::Sizes{3, 2, 1}}));

TEST(FullyShard, KeepsTheChunkOfEachRank) {
  RunRanks(4, [](Rank& rank) {
    Filled<nn::Linear> linear(2, 7);
    const at::Tensor before = linear.weight->detach().clone();
    fully_shard(linear, rank.mesh({4}, {"dp"}));
    const std::vector<at::Tensor> chunks = before.chunk(4);
    EXPECT_TRUE(local_tensor(linear.weight).equal(chunks[static_cast<std::size_t>(rank.rank())]));
    EXPECT_EQ(DistributedTensor(linear.weight).placements(), Placements{Shard{0}});
    EXPECT_TRUE(linear.weight->requires_grad());
  });
}

TEST(FullyShard, ShowsWholeTensorsInForwardAndShardsAfter) {
  RunRanks(2, [](Rank& rank) {
    ShardedModel model(rank.mesh({2}, {"dp"}), {}, {4, 6, 3});
    bool seen_whole = false;
    model.blocks[0]->add_forward_hook([&](nn::ModuleBase&, nn::TensorList) {
      seen_whole = model.blocks[1]->up->weight->defined();
    });
    model.blocks[1]->up->add_forward_hook([&](nn::ModuleBase& up, nn::TensorList) {
      seen_whole = !tessera::is_distributed(up.slot("weight")->get());
    });
    local_loss(model, rank).backward();
    EXPECT_TRUE(seen_whole);
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_TRUE(tessera::is_distributed(slot->get())) << name;
    }
  });
}

TEST(FullyShard, ShardsAModelOnTheMetaDevice) {
  RunRanks(3, [](Rank& rank) {
    Filled<SmallModel> reference(5, 7, 2);
    const auto model = testing::made_on_meta<SmallModel>(5, 7, 2);
    shard(*model, rank.mesh({3}, {"dp"}));
    nn::to_empty(*model, c10::kCPU);
    testing::fill(*model);
    EXPECT_TRUE((*model)(batch(5, 0)).allclose(reference(batch(5, 0))));
  });
}

TEST(FullyShard, NamesParametersLeftOnTheMetaDevice) {
  RunRanks(1, [](Rank& rank) {
    const auto model = testing::made_on_meta<SmallModel>(5, 7, 2, 1);
    shard(*model, rank.mesh({1}, {"dp"}));
    EXPECT_ERROR((*model)(batch(5, 0)), "6 were never filled ('block0.up.weight',", "nn::to_empty");
    EXPECT_ERROR(unshard(*model), "'head.weight'", "nn::to_empty");
  });
}

TEST(FullyShard, KeepsTiedWeightsTied) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(4, 6, 4);
    SmallModel alone(4, 6, 4);
    for (SmallModel* m : {&model, &alone}) {
      m->register_module("other", std::make_shared<nn::Linear>(4, 4))
          ->tie_slot("weight", m->head->slot("weight"));
      m->add_forward_hook([m](nn::ModuleBase&, nn::TensorList outputs) {
        *outputs[0] = outputs[0]->matmul(*m->head->weight);
      });
      testing::fill(*m);
    }
    shard(model, rank.mesh({2}, {"dp"}));
    EXPECT_TRUE(model(batch(4, 0)).allclose(alone(batch(4, 0))));
  });
}

TEST(FullyShard, RefusesAParameterSharedWithAnotherUnit) {
  RunRanks(1, [](Rank& rank) {
    SmallModel model(4, 6, 4);
    model.blocks[0]->up->tie_slot("weight", model.blocks[1]->up->slot("weight"));
    EXPECT_ERROR(fully_shard(*model.blocks[0], rank.mesh({1}, {"dp"})),
                 "'up.weight' is shared with a tessera::nn::Linear outside of this unit");
    EXPECT_FALSE(tessera::is_distributed(model.blocks[0]->up->weight));
  });
}

TEST(FullyShard, RefusesASecondCall) {
  RunOnMesh({1}, {"dp"}, [](const DeviceMesh& mesh) {
    nn::Linear linear(2, 2);
    fully_shard(linear, mesh);
    EXPECT_TRUE(is_fully_sharded(linear));
    EXPECT_ERROR(fully_shard(linear, mesh), "apply one of them once");
  });
}

TEST(FullyShard, RefusesAMeshOfThreeDimensions) {
  RunRanks(2, [](Rank& rank) {
    nn::Linear linear(2, 2);
    EXPECT_ERROR(fully_shard(linear, rank.mesh({1, 2, 1}, {"a", "b", "c"})),
                 "fully_shard: the mesh is DeviceMesh((a=1, b=2, c=1), cpu)");
    EXPECT_FALSE(is_fully_sharded(linear));
  });
}

TEST(FullyShard, RefusesAParameterOnAMeshOfAnotherRoot) {
  RunRanks(2, [](Rank& rank) {
    nn::Linear linear(2, 2);
    const at::Tensor weight =
        distribute_tensor(linear.weight->detach(), rank.mesh({2}, {"tp"}), {Shard{0}}).tensor();
    linear.slot("weight")->set(weight.detach().requires_grad_());
    EXPECT_ERROR(fully_shard(linear, rank.mesh({2}, {"dp"})), "'weight'");
    EXPECT_FALSE(tessera::is_distributed(linear.bias));
  });
}

TEST(FullyShard, RefusesAListOfModules) {
  RunRanks(1, [](Rank& rank) {
    nn::ModuleList list;
    list.push_back(std::make_shared<nn::Linear>(2, 2));
    EXPECT_ERROR(fully_shard(list, rank.mesh({1}, {"dp"})),
                 "a ModuleList has no forward to gather before");
  });
}

}  // namespace
}  // namespace tessera::fsdp
