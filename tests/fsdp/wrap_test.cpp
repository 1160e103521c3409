// Wrap plans: which modules a policy makes units, and what a plan must fit.

#include "fsdp/training/training.h"
#include "tessera/fsdp/wrap_policy.h"
#include "tessera/nn/containers.h"

namespace tessera::fsdp {
namespace {

using testing::Block;
using Names = std::vector<std::string>;

Names names(const WrapPlan& plan) {
  Names fqns;
  for (const PlannedUnit& unit : plan) {
    fqns.push_back(unit.fqn);
  }
  return fqns;
}

struct PolicyCase {
  const char* name;
  Policy policy;
  Names units;
};

TEST(Policy, ChoosesUnits) {
  const SmallModel model(4, 6, 3);  // elements of up: 30, of down: 28
  const Names blocks{"block0", "block1", "block2", ""};
  const Names ups{"block0.up", "block1.up", "block2.up", ""};
  const PolicyCase cases[] = {
      {"class", wrap_class<Block>(), blocks},
      {"name", wrap_named("block?.up"), ups},
      {"size, up alone", wrap_larger_than(30), ups},
      {"size, of what is left", wrap_larger_than(58), blocks},
      {"predicate",
       wrap_if([](const Candidate& each) { return each.fqn == "head"; }),
       {"head", ""}},
      {"first of", first_of({wrap_named("block1"), wrap_named("head")}), {"block1", "head", ""}},
  };
  for (const PolicyCase& each : cases) {
    EXPECT_EQ(names(plan_units(model, each.policy)), each.units) << each.name;
  }
}

TEST(Policy, GivesUnitsTheRootsOptionsOrTheirOwn) {
  const SmallModel model(4, 6, 3);
  const Options root{.mp_policy = {.param_dtype = at::kBFloat16},
                     .offload_policy = OffloadPolicy{}};
  const WrapPlan plan = plan_units(
      model,
      first_of({wrap_named("block1", {.reshard_after_forward = false}), wrap_class<Block>()}),
      root);
  EXPECT_EQ(to_string(plan[0].options), to_string(root));
  EXPECT_EQ(to_string(plan[1].options), "{.reshard_after_forward = false}");
  EXPECT_EQ(to_string(plan.back().options), to_string(root));
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

/// Two parts that share one block, as ALBERT's layers do.
struct Repeating : nn::Module<Repeating> {
  struct Half : nn::Module<Half> {
    explicit Half(const std::shared_ptr<Block>& shared) {
      own = register_module("own", std::make_shared<nn::Linear>(4, 4));
      inner = register_module("inner", shared);
    }
    at::Tensor forward(const at::Tensor& x) { return (*inner)((*own)(x)); }
    std::shared_ptr<nn::Linear> own;
    std::shared_ptr<Block> inner;
  };

  Repeating() {
    const auto shared = std::make_shared<Block>(4, 6);
    first = register_module("first", std::make_shared<Half>(shared));
    second = register_module("second", std::make_shared<Half>(shared));
  }
  at::Tensor forward(const at::Tensor& x) { return (*second)((*first)(x)); }
  std::shared_ptr<Half> first, second;
};

const PlannedUnit& unit_called(const WrapPlan& plan, const std::string& fqn) {
  return *std::ranges::find(plan, fqn, &PlannedUnit::fqn);
}

TEST(Policy, GivesAModuleRegisteredTwiceToTheLowestUnitThatHoldsBothPlaces) {
  const Repeating model;
  const WrapPlan plan = plan_units(model, wrap_class<Repeating::Half>());
  EXPECT_EQ(unit_called(plan, "first").parameters, (Names{"first.own.weight", "first.own.bias"}));
  EXPECT_EQ(unit_called(plan, "").parameters,
            (Names{"first.inner.up.weight", "first.inner.up.bias", "first.inner.down.weight",
                   "first.inner.down.bias"}));
  EXPECT_EQ(unit_called(plan_units(model, wrap_class<Block>()), "first.inner").parameters.size(),
            4u);
}

TEST(WrapPlan, TrainsAsOneRankDoes) {
  const at::Tensor batch = testing::uniform_values({6, 4}, 7);
  Filled<Repeating> alone;
  alone(batch).square().mean().backward();
  for (const int ranks : {1, 2, 3}) {
    RunRanks(ranks, [&](Rank& rank) {
      Filled<Repeating> model;
      apply_plan(model, rank.mesh({ranks}, {"dp"}),
                 plan_units(model, wrap_class<Repeating::Half>()));
      const std::int64_t rows = 6 / ranks;
      model(batch.narrow(0, rank.rank() * rows, rows)).square().mean().backward();
      expect_gradients(model, testing::gradients_of(alone));
    });
  }
}

TEST(WrapPlan, LeavesUnitsAndIgnoredParametersAlone) {
  RunRanks(1, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({1}, {"dp"});
    SmallModel model(4, 6, 3);
    fully_shard(*model.blocks[0], mesh);
    const Options options{.ignored = {model.head->slot("bias")}};
    const WrapPlan plan = plan_units(model, wrap_named("block?"), options);
    EXPECT_EQ(names(plan), (Names{"block1", "block2", ""}));
    apply_plan(model, mesh, plan);
    EXPECT_FALSE(tessera::is_distributed(model.head->slot("bias")->get()));
    EXPECT_TRUE(tessera::is_distributed(model.head->slot("weight")->get()));
  });
}

/// A wrong plan or policy, and the names that its error has.
struct Refusal {
  const char* name;
  std::function<void(SmallModel& model, const DeviceMesh& mesh)> act;
  std::vector<std::string> words;
};

void PrintTo(const Refusal& refusal, std::ostream* out) {
  *out << refusal.name;
}

/// Applies a plan of blocks that `spoil` has changed.
std::function<void(SmallModel&, const DeviceMesh&)> spoilt(
    const std::function<void(WrapPlan&)>& spoil) {
  return [spoil](SmallModel& model, const DeviceMesh& mesh) {
    WrapPlan plan = plan_units(model, wrap_class<Block>());
    spoil(plan);
    apply_plan(model, mesh, plan);
  };
}

struct Tree : nn::Module<Tree> {
  Tree() {
    register_module("list", std::make_shared<nn::ModuleList>())
        ->push_back(std::make_shared<nn::Linear>(2, 2));
  }
};

std::vector<Refusal> refusals() {
  return {
      {"ParameterInNoUnit",
       spoilt([](WrapPlan& plan) { plan[1].parameters.erase(plan[1].parameters.begin()); }),
       {"'block1.up.weight'", "Options::ignored"}},
      {"ParameterInTwoUnits",
       spoilt([](WrapPlan& plan) { plan.back().parameters.push_back("block0.up.bias"); }),
       {"'block0.up.bias'", "'block0'", "the root"}},
      {"ParameterOfAnotherModule",
       spoilt([](WrapPlan& plan) {
         std::swap(plan[0].parameters.front(), plan[1].parameters.front());
       }),
       {"'block1.up.weight'", "'block0'"}},
      {"UnknownParameter",
       spoilt([](WrapPlan& plan) { plan[0].parameters.push_back("block0.bias"); }),
       {"'block0.bias'"}},
      {"UnknownModule", spoilt([](WrapPlan& plan) { plan[0].fqn = "block7"; }), {"'block7'"}},
      {"UnitTwice",
       spoilt(
           [](WrapPlan& plan) { plan.insert(plan.begin(), PlannedUnit{"block2", {}, {}, 0, 0}); }),
       {"'block2'", "twice"}},
      {"AppliedTwice",
       [](SmallModel&, const DeviceMesh& mesh) {
         SmallModel own(4, 6, 3);
         const WrapPlan plan = plan_units(own, wrap_class<Block>());
         apply_plan(own, mesh, plan);
         apply_plan(own, mesh, plan);
       },
       {"SmallModel", "is a unit already"}},
      {"PatternWithoutModule",
       [](SmallModel& model, const DeviceMesh&) {
         plan_units(model, first_of({wrap_class<Block>(), wrap_named("blocks.*")}));
       },
       {"'blocks.*'", "SmallModel"}},
      {"EmptyPolicy",
       [](SmallModel& model, const DeviceMesh&) { plan_units(model, Policy()); },
       {"plan_units", "wrap_class"}},
      {"FrozenAmongTrainable",
       [](SmallModel&, const DeviceMesh&) {
         SmallModel own(4, 6, 3);
         own.blocks[1]->up->slot("bias")->get().set_requires_grad(false);
         EXPECT_EQ(plan_units(own, wrap_class<Block>({.allow_mixed_frozen = true}))[1].frozen_numel,
                   6);
         plan_units(own, wrap_class<Block>());
       },
       {"'block1'", "'block1.up.bias'", "24 bytes", "allow_mixed_frozen"}},
      {"ModuleWithoutForward",
       [](SmallModel&, const DeviceMesh&) { plan_units(Tree(), wrap_named("list")); },
       {"'list'", "ModuleList"}},
  };
}

class WrapRefusals : public ::testing::TestWithParam<Refusal> {};

TEST_P(WrapRefusals, NameTheCauseAndChangeNothing) {
  RunRanks(1, [](Rank& rank) {
    SmallModel model(4, 6, 3);
    const DeviceMesh mesh = rank.mesh({1}, {"dp"});
    const std::string error = testing::message_of([&] { GetParam().act(model, mesh); });
    for (const std::string& word : GetParam().words) {
      EXPECT_CONTAINS(error, word);
    }
    EXPECT_FALSE(is_fully_sharded(*model.blocks[0]));
  });
}

INSTANTIATE_TEST_SUITE_P(Table, WrapRefusals, ::testing::ValuesIn(refusals()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::fsdp
