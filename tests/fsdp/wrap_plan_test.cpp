// What a plan must fit before anything changes, and what counts as the same plan again.
#include <gtest/gtest.h>

#include "fsdp/small_model.h"
#include "tessera/core/error.h"
#include "tessera/fsdp/policy.h"
#include "testing/errors.h"

namespace tessera::fsdp {
namespace {

using testing::Block;
using testing::ErrorOf;
using testing::ErrorsOfRanks;
using testing::SmallModel;

bool mentions(const std::string& message, const std::string& text) {
  return message.find(text) != std::string::npos;
}

/// Applies the plan after `spoil`; the Error, with nothing changed.
std::string error_of_plan(const std::function<void(WrapPlan&)>& spoil) {
  std::string error;
  RunRanks(1, [&](Rank& rank) {
    SmallModel model(4, 6, 3);
    WrapPlan plan = plan_units(model, wrap_class<Block>());
    spoil(plan);
    error = ErrorOf([&] { fully_shard(model, rank.mesh({1}, {"dp"}), plan); });
    EXPECT_FALSE(is_fully_sharded(*model.blocks[0]));
    for (const auto& [name, slot] : model.named_slots()) {
      EXPECT_FALSE(tessera::is_distributed(slot->get())) << name;
    }
  });
  return error;
}

TEST(WrapPlan, RefusesToLeaveAParameterOut) {
  const std::string error =
      error_of_plan([](WrapPlan& plan) { plan[1].parameters.erase(plan[1].parameters.begin()); });
  EXPECT_TRUE(mentions(error, "no unit for parameter 'block1.up.weight'")) << error;
}

TEST(WrapPlan, LeavesOutWhatIsIgnored) {
  RunRanks(1, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    const Options options{.ignored = {model.head->slot("bias")}};
    fully_shard(model, rank.mesh({1}, {"dp"}), plan_units(model, wrap_class<Block>(), options));
    EXPECT_FALSE(tessera::is_distributed(model.head->slot("bias")->get()));
    EXPECT_TRUE(tessera::is_distributed(model.head->slot("weight")->get()));
  });
}

TEST(WrapPlan, RefusesAParameterInTwoUnits) {
  const std::string error =
      error_of_plan([](WrapPlan& plan) { plan.back().parameters.push_back("block0.up.bias"); });
  EXPECT_TRUE(mentions(error, "'block0.up.bias' in two units, 'block0' and the root")) << error;
}

TEST(WrapPlan, RefusesAUnitTwice) {
  const std::string error = error_of_plan([](WrapPlan& plan) {
    plan.push_back(plan.front());
    plan.back().parameters.clear();
  });
  EXPECT_TRUE(mentions(error, "'block0' twice")) << error;
}

TEST(WrapPlan, RefusesAParameterInAUnitElsewhere) {
  const std::string error = error_of_plan(
      [](WrapPlan& plan) { std::swap(plan[0].parameters.front(), plan[1].parameters.front()); });
  EXPECT_TRUE(mentions(error, "does not hold")) << error;
}

/// Applies a plan with `first` and then one with `second`, on a mesh of its own each; the message
/// of rank 0, "" if there is no error.
std::string error_of_second(const Options& first, const Options& second,
                            const std::string& second_mesh = "dp") {
  return ErrorsOfRanks(2, [&](Rank& rank) {
    SmallModel model(4, 6, 3);
    fully_shard(model, rank.mesh({2}, {"dp"}), plan_units(model, wrap_class<Block>(), first));
    fully_shard(model, rank.mesh({2}, {second_mesh}),
                plan_units(model, wrap_class<Block>(), second));
  })[0];
}

PlacementFunction shards_weights_on(std::int64_t dim) {
  return [dim](const std::string&, const at::Tensor& parameter) -> std::optional<Placement> {
    if (parameter.dim() < 2) return std::nullopt;
    return Shard{dim};
  };
}

TEST(WrapPlan, ShowsAnotherMesh) {
  const std::string error = error_of_second({}, {}, "data");
  EXPECT_TRUE(mentions(error, "(dp=2)") && mentions(error, "(data=2)")) << error;
}

TEST(WrapPlan, ShowsOtherPlacements) {
  const std::string error = error_of_second({}, {.shard_placement = shards_weights_on(1)});
  EXPECT_TRUE(mentions(error, "block0.up.weight in block0: Shard(0)")) << error;
  EXPECT_TRUE(mentions(error, "block0.up.weight in block0: Shard(1)")) << error;
  EXPECT_FALSE(mentions(error, "up.bias")) << error;
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
    fully_shard(model, grid["dp"], plan_units(model, wrap_class<Block>()));
    fully_shard(model, grid["dp"], plan_units(model, wrap_class<Block>(), options));
  });
  const std::string& error = errors[0];
  EXPECT_TRUE(mentions(error, "head.bias in (root): Shard(0) on DeviceMesh((ep=1), cpu)")) << error;
  EXPECT_FALSE(mentions(error, "head.weight")) << error;
}

TEST(WrapPlan, ShowsOtherOffloading) {
  const std::string error = error_of_second({.offload_policy = OffloadPolicy{}},
                                            {.offload_policy = OffloadPolicy{.pin_memory = false}});
  EXPECT_TRUE(mentions(error, "unpinned")) << error;
}

TEST(WrapPlan, ShowsAnAllGatherExtension) {
  const auto extension = [](const std::string& name, const at::Tensor&) {
    return name == "head.weight" ? std::optional<AllGatherExtension>(AllGatherExtension{})
                                 : std::nullopt;
  };
  const std::string error = error_of_second({}, {.all_gather_extension = extension});
  EXPECT_TRUE(mentions(error, "head.weight in (root): Shard(0) by an all-gather extension"))
      << error;
}

TEST(WrapPlan, ChangesNothingTheSecondTimeAroundAUnitMadeByHand) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    const DeviceMesh mesh = rank.mesh({2}, {"dp"});
    fully_shard(*model.blocks[1], mesh);
    fully_shard(model, mesh, plan_units(model, wrap_class<Block>()));
    const at::Tensor weight = model.blocks[1]->up->slot("weight")->persistent();
    fully_shard(model, mesh, plan_units(model, wrap_class<Block>()));
    EXPECT_TRUE(model.blocks[1]->up->slot("weight")->persistent().is_same(weight));
  });
}

TEST(WrapPlan, ChangesNothingTheSecondTimeAroundAPlannedPart) {
  RunRanks(2, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    const DeviceMesh mesh = rank.mesh({2}, {"dp"});
    const Policy linears = wrap_class<nn::Linear>();
    const auto apply = [&] {
      fully_shard(*model.blocks[1], mesh, plan_units(*model.blocks[1], linears));
      fully_shard(model, mesh, plan_units(model, wrap_class<Block>()));
    };
    apply();
    EXPECT_TRUE(is_fully_sharded(*model.blocks[1]->up));
    EXPECT_FALSE(is_fully_sharded(*model.blocks[0]->up));
    const at::Tensor weight = model.blocks[1]->up->slot("weight")->persistent();
    apply();
    EXPECT_TRUE(model.blocks[1]->up->slot("weight")->persistent().is_same(weight));
    testing::loss_of(model, testing::wave({4, 4}, 7), rank.rank() * 2, 2).backward();
  });
}

TEST(WrapPlan, RefusesToPlanAUnitOfAnotherPlan) {
  RunRanks(1, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    fully_shard(model, rank.mesh({1}, {"dp"}), plan_units(model, wrap_class<Block>()));
    const std::string error =
        ErrorOf([&] { plan_units(*model.blocks[0], wrap_class<nn::Linear>()); });
    EXPECT_TRUE(mentions(error, "is a unit already")) << error;
  });
}

TEST(Policy, RefusesFrozenParametersAmongTrainableOnesOfTheRoot) {
  SmallModel model(4, 6, 3);
  model.head->slot("bias")->get().set_requires_grad(false);
  const std::string error = ErrorOf([&] { plan_units(model, wrap_class<Block>()); });
  EXPECT_TRUE(mentions(error, "the root") && mentions(error, "'head.bias'")) << error;
  EXPECT_TRUE(mentions(error, "12 bytes")) << error;
  const WrapPlan plan = plan_units(model, wrap_class<Block>(), {}, MixedFrozenRoot::kAllowed);
  EXPECT_EQ(plan.back().frozen_numel, 3);
}

}  // namespace
}  // namespace tessera::fsdp
