// Plans of a model that has one module at two places.
#include <gtest/gtest.h>

#include "fsdp/training/small_model.h"
#include "tessera/fsdp/wrap_policy.h"
#include "testing/module_values.h"

namespace tessera::fsdp {
namespace {

using testing::Block;
using Names = std::vector<std::string>;

const PlannedUnit& unit_called(const WrapPlan& plan, const std::string& fqn) {
  return *std::ranges::find(plan, fqn, &PlannedUnit::fqn);
}

/// Two parts that share one block, as ALBERT's layers do.
class Repeating : public nn::Module<Repeating> {
 public:
  class Half : public nn::Module<Half> {
   public:
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

TEST(Policy, GivesAModuleRegisteredTwiceToTheLowestUnitThatHoldsBothPlaces) {
  const Repeating model;
  const WrapPlan plan = plan_units(model, wrap_class<Repeating::Half>());
  EXPECT_EQ(unit_called(plan, "first").parameters, (Names{"first.own.weight", "first.own.bias"}));
  EXPECT_EQ(unit_called(plan, "").parameters,
            (Names{"first.inner.up.weight", "first.inner.up.bias", "first.inner.down.weight",
                   "first.inner.down.bias"}));
}

TEST(Policy, GivesAModuleRegisteredTwiceItsParametersWhereItIsAUnit) {
  const Repeating model;
  const WrapPlan plan = plan_units(model, wrap_class<Block>());
  EXPECT_EQ(unit_called(plan, "first.inner").parameters.size(), 4u);
}

TEST(WrapPlan, TrainsWithAModuleRegisteredTwice) {
  const at::Tensor batch = testing::uniform_values({6, 4}, 7);
  testing::Filled<Repeating> alone;
  alone(batch).square().mean().backward();
  RunRanks(2, [&](Rank& rank) {
    testing::Filled<Repeating> model;
    apply_plan(model, rank.mesh({2}, {"dp"}), plan_units(model, wrap_class<Repeating::Half>()));
    model(batch.narrow(0, rank.rank() * 3, 3)).square().mean().backward();
    testing::expect_gradients(model, testing::gradients_of(alone));
  });
}

}  // namespace
}  // namespace tessera::fsdp
