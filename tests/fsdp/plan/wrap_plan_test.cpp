// What a plan must fit before anything changes, and what counts as the same plan again.
#include <gtest/gtest.h>

#include "fsdp/training/small_model.h"
#include "tessera/core/error.h"
#include "tessera/fsdp/wrap_policy.h"
#include "testing/errors.h"

namespace tessera::fsdp {
namespace {

using testing::Block;
using testing::ErrorsOfRanks;
using testing::SmallModel;

/// The message of the error of a plan that `spoil` has changed; the model stays as it was.
std::string error_of_plan(const std::function<void(WrapPlan&)>& spoil) {
  std::string error;
  RunRanks(1, [&](Rank& rank) {
    SmallModel model(4, 6, 3);
    WrapPlan plan = plan_units(model, wrap_class<Block>());
    spoil(plan);
    error = testing::message_of([&] { apply_plan(model, rank.mesh({1}, {"dp"}), plan); });
    EXPECT_FALSE(is_fully_sharded(*model.blocks[0]));
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_FALSE(tessera::is_distributed(slot->get())) << name;
    }
  });
  return error;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
TEST(WrapPlan, IsAppliedByTheNameOfTheFirstVersion) {
  RunRanks(1, [](Rank& rank) {
    SmallModel by_mesh(4, 6, 3), by_world(4, 6, 3);
    const WrapPlan plan = plan_units(by_mesh, wrap_class<Block>());
    fully_shard(by_mesh, rank.mesh({1}, {"dp"}), plan);
    fully_shard(by_world, rank.world(), plan);
    EXPECT_TRUE(is_fully_sharded(*by_mesh.blocks[0]));
    EXPECT_TRUE(is_fully_sharded(*by_world.blocks[0]));
  });
}
#pragma GCC diagnostic pop

TEST(WrapPlan, RefusesToLeaveAParameterOut) {
  const std::string error =
      error_of_plan([](WrapPlan& plan) { plan[1].parameters.erase(plan[1].parameters.begin()); });
  EXPECT_CONTAINS(error, "no unit for parameter 'block1.up.weight'");
}

TEST(WrapPlan, LeavesOutIgnoredModules) {
  RunRanks(1, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    const Options options{.ignored = {model.head->slot("bias")}};
    apply_plan(model, rank.mesh({1}, {"dp"}), plan_units(model, wrap_class<Block>(), options));
    EXPECT_FALSE(tessera::is_distributed(model.head->slot("bias")->get()));
    EXPECT_TRUE(tessera::is_distributed(model.head->slot("weight")->get()));
  });
}

TEST(WrapPlan, RefusesAParameterInTwoUnits) {
  const std::string error =
      error_of_plan([](WrapPlan& plan) { plan.back().parameters.push_back("block0.up.bias"); });
  EXPECT_CONTAINS(error, "'block0.up.bias' in two units, 'block0' and the root");
}

TEST(WrapPlan, RefusesAUnitTwice) {
  const std::string error = error_of_plan([](WrapPlan& plan) {
    plan.push_back(plan.front());
    plan.back().parameters.clear();
  });
  EXPECT_CONTAINS(error, "'block0' twice");
}

TEST(WrapPlan, RefusesAParameterInAUnitElsewhere) {
  const std::string error = error_of_plan(
      [](WrapPlan& plan) { std::swap(plan[0].parameters.front(), plan[1].parameters.front()); });
  EXPECT_CONTAINS(error, "does not hold");
}

/// Applies a plan with `first` and then one with `second`, each on its own mesh; the message
/// of rank 0, "" if there is no error.
std::string error_of_second(const Options& first, const Options& second,
                            const std::string& second_mesh = "dp") {
  return ErrorsOfRanks(2, [&](Rank& rank) {
    SmallModel model(4, 6, 3);
    apply_plan(model, rank.mesh({2}, {"dp"}), plan_units(model, wrap_class<Block>(), first));
    apply_plan(model, rank.mesh({2}, {second_mesh}),
               plan_units(model, wrap_class<Block>(), second));
  })[0];
}

PlacementFunction shards_weights_on(std::int64_t dim) {
  return [dim](const std::string&, const at::Tensor& parameter) -> std::optional<Placement> {
    if (parameter.dim() < 2) {
      return std::nullopt;
    }
    return Shard{dim};
  };
}

TEST(WrapPlan, ShowsAnotherMesh) {
  const std::string error = error_of_second({}, {}, "data");
  EXPECT_CONTAINS(error, "(dp=2)", "(data=2)");
}

TEST(WrapPlan, ShowsOtherPlacements) {
  const std::string error = error_of_second({}, {.shard_placement = shards_weights_on(1)});
  EXPECT_CONTAINS(error, "block0.up.weight in block0: Shard(0)",
                  "block0.up.weight in block0: Shard(1)");
  EXPECT_FALSE(testing::Contains(error, {"up.bias"})) << error;
}

TEST(WrapPlan, ComparesWhatPlacementFunctionsAnswer) {
  EXPECT_EQ(error_of_second({.shard_placement = shards_weights_on(1)},
                            {.shard_placement = shards_weights_on(-1)}),
            "");
  EXPECT_EQ(error_of_second({}, {.shard_placement = shards_weights_on(0)}), "");
}

TEST(WrapPlan, ShowsAParametersOtherMesh) {
  const std::vector<std::string> errors = ErrorsOfRanks(2, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    const DeviceMesh grid = rank.mesh({2, 1}, {"dp", "ep"});
    const Options options{.parameter_mesh = [&](const std::string& name, const at::Tensor&) {
      return name == "head.bias" ? std::optional<DeviceMesh>(grid["ep"]) : std::nullopt;
    }};
    apply_plan(model, grid["dp"], plan_units(model, wrap_class<Block>()));
    apply_plan(model, grid["dp"], plan_units(model, wrap_class<Block>(), options));
  });
  const std::string& error = errors[0];
  EXPECT_CONTAINS(error, "head.bias in (root): Shard(0) on DeviceMesh((ep=1), cpu)");
  EXPECT_FALSE(testing::Contains(error, {"head.weight"})) << error;
}

TEST(WrapPlan, ShowsOtherOffloading) {
  const std::string error = error_of_second({.offload_policy = OffloadPolicy{}},
                                            {.offload_policy = OffloadPolicy{.pin_memory = false}});
  EXPECT_CONTAINS(error, "unpinned");
}

TEST(WrapPlan, ShowsAnAllGatherExtension) {
  const auto extension = [](const std::string& name, const at::Tensor&) {
    return name == "head.weight" ? std::optional<AllGatherExtension>(AllGatherExtension{})
                                 : std::nullopt;
  };
  const std::string error = error_of_second({}, {.all_gather_extension = extension});
  EXPECT_CONTAINS(error, "head.weight in (root): Shard(0) by an all-gather extension");
}

TEST(WrapPlan, ChangesNothingWhenRepeatedAroundAnExplicitUnit) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    SmallModel model(4, 6, 3);
    fully_shard(*model.blocks[1], mesh);
    apply_plan(model, mesh, plan_units(model, wrap_class<Block>()));
    const at::Tensor weight = model.blocks[1]->up->slot("weight")->persistent();
    apply_plan(model, mesh, plan_units(model, wrap_class<Block>()));
    EXPECT_TRUE(model.blocks[1]->up->slot("weight")->persistent().is_same(weight));
  });
}

TEST(WrapPlan, ChangesNothingTheSecondTimeAroundAPlannedPart) {
  RunOnMesh({2}, {"dp"}, [](Rank& rank, const DeviceMesh& mesh) {
    testing::Filled<SmallModel> model(4, 6, 3);
    const Policy linears = wrap_class<nn::Linear>();
    const auto apply = [&] {
      apply_plan(*model.blocks[1], mesh, plan_units(*model.blocks[1], linears));
      apply_plan(model, mesh, plan_units(model, wrap_class<Block>()));
    };
    apply();
    EXPECT_TRUE(is_fully_sharded(*model.blocks[1]->up));
    EXPECT_FALSE(is_fully_sharded(*model.blocks[0]->up));
    const at::Tensor weight = model.blocks[1]->up->slot("weight")->persistent();
    apply();
    EXPECT_TRUE(model.blocks[1]->up->slot("weight")->persistent().is_same(weight));
    testing::loss_of(model, testing::uniform_values({4, 4}, 7), rank.rank() * 2, 2).backward();
  });
}

TEST(WrapPlan, RefusesToPlanAUnitOfAnotherPlan) {
  RunRanks(1, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    apply_plan(model, rank.mesh({1}, {"dp"}), plan_units(model, wrap_class<Block>()));
    EXPECT_ERROR(plan_units(*model.blocks[0], wrap_class<nn::Linear>()), "is a unit already");
  });
}

TEST(Policy, RefusesFrozenParametersAmongTrainableOnesOfTheRoot) {
  SmallModel model(4, 6, 3);
  model.head->slot("bias")->get().set_requires_grad(false);
  EXPECT_ERROR(plan_units(model, wrap_class<Block>()), "the root", "'head.bias'", "12 bytes");
  const WrapPlan plan = plan_units(model, wrap_class<Block>(), {}, MixedFrozenRoot::kAllowed);
  EXPECT_EQ(plan.back().frozen_numel, 3);
}

}  // namespace
}  // namespace tessera::fsdp
