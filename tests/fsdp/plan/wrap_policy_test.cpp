#include "tessera/fsdp/wrap_policy.h"

#include "fsdp/training/training.h"
#include "tessera/nn/containers.h"

namespace tessera::fsdp {
namespace {

using testing::Block;

std::vector<std::string> names(const WrapPlan& plan) {
  std::vector<std::string> fqns;
  for (const PlannedUnit& unit : plan) {
    fqns.push_back(unit.fqn);
  }
  return fqns;
}

using Names = std::vector<std::string>;

TEST(Policy, WrapsModulesOfAClass) {
  const SmallModel model(4, 6, 3);
  EXPECT_EQ(names(plan_units(model, wrap_class<Block>())),
            (Names{"block0", "block1", "block2", ""}));
}

TEST(Policy, WrapsModulesByName) {
  const SmallModel model(4, 6, 3);
  EXPECT_EQ(names(plan_units(model, wrap_named("block?.up"))),
            (Names{"block0.up", "block1.up", "block2.up", ""}));
}

TEST(Policy, WrapsByTheSizeOfTheRemainingParameters) {
  const SmallModel model(4, 6, 3);  // up: 30, down: 28
  EXPECT_EQ(names(plan_units(model, wrap_larger_than(30))),
            (Names{"block0.up", "block1.up", "block2.up", ""}));
  EXPECT_EQ(names(plan_units(model, wrap_larger_than(58))),
            (Names{"block0", "block1", "block2", ""}));
}

TEST(Policy, TakesTheFirstAnswer) {
  const SmallModel model(4, 6, 3);
  const WrapPlan plan =
      plan_units(model, first_of({wrap_named("block1", {.reshard_after_forward = false}),
                                  wrap_class<Block>({.reshard_after_forward = true})}));
  EXPECT_EQ(plan[0].options.reshard_after_forward, true);
  EXPECT_EQ(plan[1].options.reshard_after_forward, false);
}

TEST(Policy, TakesFromTheRootWhatItLeavesOpen) {
  const SmallModel model(4, 6, 3);
  const Options root{.mp_policy = {.param_dtype = at::kBFloat16}, .reshard_after_forward = false};
  const WrapPlan plan = plan_units(model, wrap_class<Block>({.reshard_after_forward = true}), root);
  EXPECT_EQ(plan[0].options.mp_policy.param_dtype, at::kBFloat16);
  EXPECT_EQ(plan[0].options.reshard_after_forward, true);
}

TEST(Policy, PutsEveryParameterIntoOneUnit) {
  const SmallModel model(4, 6, 3);
  const WrapPlan plan = plan_units(model, wrap_class<Block>());
  std::int64_t numel = 0;
  for (const PlannedUnit& unit : plan) {
    numel += unit.numel;
  }
  EXPECT_EQ(numel, 3 * (4 * 6 + 6 + 6 * 4 + 4) + 4 * 3 + 3);
  EXPECT_EQ(plan.back().parameters, (Names{"head.weight", "head.bias"}));
}

TEST(Policy, GivesASharedParameterToTheLowestUnitThatHoldsItsOwners) {
  SmallModel model(4, 6, 3);
  model.blocks[0]->up->tie_slot("weight", model.blocks[2]->up->slot("weight"));
  const WrapPlan plan = plan_units(model, wrap_class<Block>());
  EXPECT_EQ(plan.back().parameters.front(), "block0.up.weight");
  SmallModel within(4, 4, 3);
  within.blocks[0]->up->tie_slot("weight", within.blocks[0]->down->slot("weight"));
  EXPECT_EQ(plan_units(within, wrap_class<Block>())[0].parameters.size(), 3u);
}

TEST(Policy, RefusesFrozenParametersAmongTrainableOnes) {
  SmallModel model(4, 6, 3);
  model.blocks[1]->up->slot("bias")->get().set_requires_grad(false);
  EXPECT_ERROR(plan_units(model, wrap_class<Block>()), "'block1.up.bias'", "24 bytes");
  EXPECT_EQ(plan_units(model, wrap_class<Block>({.allow_mixed_frozen = true}))[1].frozen_numel, 6);
}

TEST(Policy, RefusesAPatternThatNoModuleIsCalledAs) {
  const SmallModel model(4, 6, 3);
  EXPECT_ERROR(plan_units(model, wrap_named("blocks.*")), "'blocks.*'");
  EXPECT_ERROR(
      plan_units(model, first_of({wrap_class<Block>(), wrap_named("block1", {}), wrap_named("x")})),
      "'x'");
}

// Modules that are units already are called so all the same.
TEST(Policy, AllowsAPatternOfUnitsAlone) {
  RunRanks(1, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    for (const auto& block : model.blocks) {
      fully_shard(*block, rank.mesh({1}, {"dp"}));
    }
    EXPECT_EQ(names(plan_units(model, wrap_named("block?"))), Names{""});
  });
}

TEST(Policy, RefusesAModuleWithoutForward) {
  class Tree : public nn::Module<Tree> {
   public:
    Tree() {
      register_module("list", std::make_shared<nn::ModuleList>())
          ->push_back(std::make_shared<nn::Linear>(2, 2));
    }
  };
  const Tree tree;
  EXPECT_ERROR(plan_units(tree, wrap_named("list")), "the policy chose 'list', a ModuleList");
}

TEST(Policy, PrintsATable) {
  const SmallModel model(4, 6, 3);
  const WrapPlan plan = plan_units(model, wrap_class<Block>({.reshard_after_forward = false}));
  const std::string table = tessera::detail::concat(plan);
  EXPECT_EQ(table, to_string(plan));
  EXPECT_CONTAINS(table, "block1", "(root)");
  EXPECT_EQ(std::ranges::count(table, '\n'), 5) << table;
}

TEST(WrapPlan, TrainsAsOneRankDoes) {
  const at::Tensor batch = testing::uniform_values({6, 4}, 7);
  const auto tie = [](SmallModel& model) {
    model.blocks[0]->up->tie_slot("weight", model.blocks[2]->up->slot("weight"));
    testing::fill(model);
  };
  SmallModel alone(4, 6, 3);
  tie(alone);
  testing::loss_of(alone, batch, 0, 6).backward();
  RunRanks(2, [&](Rank& rank) {
    SmallModel model(4, 6, 3);
    tie(model);
    apply_plan(model, rank.mesh({2}, {"dp"}), plan_units(model, wrap_class<Block>()));
    EXPECT_TRUE(is_fully_sharded(*model.blocks[1]));
    testing::loss_of(model, batch, rank.rank() * 3, 3).backward();
    testing::expect_gradients(model, testing::gradients_of(alone));
  });
}

TEST(WrapPlan, ChangesNothingTheSecondTime) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    SmallModel model(4, 6, 3);
    const WrapPlan plan = plan_units(model, wrap_class<Block>());
    apply_plan(model, mesh, plan);
    const at::Tensor weight = model.head->slot("weight")->persistent();
    apply_plan(model, mesh, plan);
    apply_plan(model, mesh, plan_units(model, wrap_class<Block>()));
    EXPECT_TRUE(model.head->slot("weight")->persistent().is_same(weight));
  });
}

TEST(WrapPlan, ShowsHowAnotherPlanDiffers) {
  RunOnMesh({1}, {"dp"}, [](const DeviceMesh& mesh) {
    SmallModel model(4, 6, 3);
    apply_plan(model, mesh, plan_units(model, wrap_class<Block>()));
    EXPECT_CONTAINS(testing::message_of(
                        [&] { apply_plan(model, mesh, plan_units(model, wrap_named("block0"))); }),
                    "another plan was applied", "block2");
  });
}

TEST(WrapPlan, ShowsHowOtherOptionsDiffer) {
  RunOnMesh({1}, {"dp"}, [](const DeviceMesh& mesh) {
    SmallModel model(4, 6, 3);
    apply_plan(model, mesh, plan_units(model, wrap_class<Block>()));
    const auto error_of = [&](const WrapPlan& plan) {
      return testing::message_of([&] { apply_plan(model, mesh, plan); });
    };
    EXPECT_CONTAINS(
        error_of(plan_units(model, wrap_class<Block>(), {.offload_policy = OffloadPolicy{}})),
        "another plan was applied", "offloaded");
    EXPECT_CONTAINS(error_of(plan_units(model, wrap_class<Block>({.may_be_unused = true}))),
                    "another plan was applied", "may be unused");
  });
}

TEST(WrapPlan, LeavesExplicitUnitsUnchanged) {
  RunOnMesh({1}, {"dp"}, [](const DeviceMesh& mesh) {
    SmallModel model(4, 6, 3);
    fully_shard(*model.blocks[1], mesh);
    const WrapPlan plan = plan_units(model, wrap_class<Block>());
    EXPECT_EQ(names(plan), (Names{"block0", "block2", ""}));
    apply_plan(model, mesh, plan);
    EXPECT_TRUE(is_fully_sharded(*model.blocks[2]));
  });
}

TEST(WrapPlan, RefusesThePlanOfAnotherTree) {
  RunRanks(1, [](Rank& rank) {
    const SmallModel larger(4, 6, 3, 4);
    SmallModel model(4, 6, 3);
    EXPECT_ERROR(apply_plan(model, rank.mesh({1}, {"dp"}), plan_units(larger, wrap_class<Block>())),
                 "there is no such module without a unit");
    EXPECT_FALSE(is_fully_sharded(*model.blocks[0]));
  });
}

}  // namespace
}  // namespace tessera::fsdp
