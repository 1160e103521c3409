// What a policy says of a class of modules, against what the root's options say.
#include <gtest/gtest.h>

#include "fsdp/training/small_model.h"
#include "tessera/fsdp/wrap_policy.h"

namespace tessera::fsdp {
namespace {

using testing::Block;
using testing::SmallModel;

PlacementFunction all_on(std::int64_t dim) {
  return [dim](const std::string&, const at::Tensor& parameter) -> std::optional<Placement> {
    if (parameter.dim() < 2) {
      return std::nullopt;
    }
    return Shard{dim};
  };
}

std::int64_t local_size(const nn::ModuleBase& module, std::int64_t dim) {
  return local_tensor(module.slot("weight")->persistent()).size(dim);
}

TEST(UnitOptions, OffloadAClass) {
  const SmallModel model(4, 6, 3);
  const WrapPlan plan =
      plan_units(model, wrap_class<Block>({.offload_policy = OffloadPolicy{.pin_memory = false}}));
  ASSERT_TRUE(plan[0].options.offload_policy.has_value());
  EXPECT_FALSE(plan[0].options.offload_policy->pin_memory);
  EXPECT_FALSE(plan.back().options.offload_policy.has_value());
}

TEST(UnitOptions, ExceptAClassFromOffloading) {
  const SmallModel model(4, 6, 3);
  const Options root{.offload_policy = OffloadPolicy{}};
  EXPECT_TRUE(plan_units(model, wrap_class<Block>(), root)[0].options.offload_policy.has_value());
  const UnitOptions stays{.offload_policy = std::optional<OffloadPolicy>()};
  const WrapPlan plan = plan_units(model, wrap_class<Block>(stays), root);
  EXPECT_FALSE(plan[0].options.offload_policy.has_value());
  EXPECT_TRUE(plan.back().options.offload_policy.has_value());
}

TEST(UnitOptions, PlaceAClass) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(4, 6, 4);
    apply_plan(model, rank.mesh({2}, {"dp"}),
               plan_units(model, wrap_class<Block>({.shard_placement = all_on(1)}),
                          {.shard_placement = all_on(0)}));
    EXPECT_EQ(local_size(*model.blocks[0]->up, 0), 6);
    EXPECT_EQ(local_size(*model.blocks[0]->up, 1), 2);
    EXPECT_EQ(local_size(*model.head, 0), 2);
  });
}

TEST(UnitOptions, AskFunctionsByTheNameWithinTheUnit) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(4, 6, 4);
    const PlacementFunction up_whole = [](const std::string& name,
                                          const at::Tensor&) -> std::optional<Placement> {
      if (name != "up.weight") {
        return std::nullopt;
      }
      return Replicate{};
    };
    apply_plan(model, rank.mesh({2}, {"dp"}),
               plan_units(model, wrap_class<Block>({.shard_placement = up_whole})));
    EXPECT_EQ(local_size(*model.blocks[2]->up, 0), 6);
    EXPECT_EQ(local_size(*model.blocks[2]->down, 0), 2);
  });
}

TEST(UnitOptions, GiveAClassItsMesh) {
  RunOnMesh({2, 2}, {"dp", "ep"}, [](const DeviceMesh& grid) {
    SmallModel model(4, 6, 4);
    const MeshFunction experts = [&](const std::string&, const at::Tensor&) {
      return std::optional<DeviceMesh>(grid["ep"]);
    };
    apply_plan(model, grid.flatten("all"),
               plan_units(model, wrap_named("block1", {.parameter_mesh = experts})));
    EXPECT_EQ(local_size(*model.blocks[1]->down, 0), 2);
    EXPECT_EQ(local_size(*model.head, 0), 1);
  });
}

}  // namespace
}  // namespace tessera::fsdp
