// A world in place of a mesh: all of its ranks.

#include "fsdp/training/training.h"
#include "tessera/fsdp/wrap_policy.h"

namespace tessera::fsdp {
namespace {

using testing::Training;

class WorldMesh : public ::testing::TestWithParam<int> {};

TEST_P(WorldMesh, IsOneDimensionOfAllRanks) {
  RunRanks(GetParam(), [](Rank& rank) {
    const DeviceMesh mesh = world_mesh(rank.world());
    EXPECT_EQ(mesh, rank.mesh({rank.size()}, {"dp"}));
    EXPECT_EQ(mesh.local_rank(), rank.rank());
  });
}

TEST_P(WorldMesh, TrainsAsOneRankDoes) {
  const Training expected = testing::train_alone({}, 3);
  RunRanks(GetParam(), [&](Rank& rank) {
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    // Each form, and a mesh made explicitly beside them.
    fully_shard({model.blocks[0].get(), model.blocks[1].get()}, rank.world());
    replicate(*model.blocks[2], rank.world());
    fully_shard(*model.head, rank.mesh({rank.size()}, {"dp"}));
    fully_shard(model, rank.world(), {.reshard_after_forward = true});
    testing::expect_training(model, rank, expected);
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_EQ(sharding_spec(slot->persistent()).mesh, world_mesh(rank.world())) << name;
    }
  });
}

TEST_P(WorldMesh, TakesAPlan) {
  const Training expected = testing::train_alone({}, 2);
  RunRanks(GetParam(), [&](Rank& rank) {
    Filled<SmallModel> model(kDim, kHidden, kClasses);
    const WrapPlan plan = plan_units(model, wrap_class<testing::Block>());
    apply_plan(model, rank.world(), plan);
    EXPECT_TRUE(is_fully_sharded(*model.blocks[1]));
    testing::expect_training(model, rank, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, WorldMesh, ::testing::Values(1, 3, 4));

TEST(WorldMeshErrors, AMissingWorldIsAnError) {
  nn::Linear linear(3, 5);
  EXPECT_ERROR(fully_shard(linear, comm::WorldPtr()), "the world is null");
  EXPECT_ERROR(replicate(linear, comm::WorldPtr()), "the world is null");
  EXPECT_FALSE(is_fully_sharded(linear));
}

}  // namespace
}  // namespace tessera::fsdp
