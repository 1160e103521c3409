#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "nn/layers_of_each_kind.h"
#include "tessera/core/error.h"
#include "tessera/nn/child.h"
#include "tessera/nn/dropout.h"
#include "testing/errors.h"

namespace tessera::nn {
namespace {

TEST(Linear, IsLibtorchsLinear) {
  Linear module(5, 3);
  init_weights(module, 1);
  const at::Tensor x = at::randn({2, 4, 5});
  EXPECT_TRUE(module(x).allclose(at::linear(x, *module.weight, *module.bias)));
}

TEST(Linear, StartsWithinItsBound) {
  Linear module(100, 50);
  init_weights(module, 1);
  EXPECT_LE(module.weight->abs().max().item<double>(), 0.1);
  EXPECT_NEAR(module.weight->std().item<double>(), 0.1 / std::sqrt(3.0), 2e-3);
}

TEST(Linear, DefersItsBias) {
  Linear module(5, 3);
  init_weights(module, 1);
  module.set_defer_bias(true);
  const at::Tensor x = at::randn({2, 5});
  EXPECT_TRUE(module.defers_bias());
  EXPECT_TRUE(module(x).allclose(at::linear(x, *module.weight)));
}

TEST(Linear, WithoutBiasHasOneParameter) {
  Linear module(5, 3, {.bias = false});
  EXPECT_EQ(module.named_slots().size(), 1U);
  EXPECT_FALSE(module.bias.defined());
  module.set_defer_bias(true);
  EXPECT_FALSE(module.defers_bias());
}

TEST(Embedding, StartsStandardNormal) {
  Embedding module(200, 50);
  init_weights(module, 1);
  EXPECT_NEAR(module.weight->mean().item<double>(), 0.0, 0.04);
  EXPECT_NEAR(module.weight->std().item<double>(), 1.0, 0.03);
}

TEST(LayerNorm, IsLibtorchs) {
  LayerNorm module(6);
  init_weights(module, 1);
  const at::Tensor x = at::randn({3, 6});
  EXPECT_TRUE(module(x).allclose(at::layer_norm(x, {6}), 1e-5, 1e-6));
}

TEST(RMSNorm, IsLibtorchs) {
  RMSNorm module(6, 1e-3);
  init_weights(module, 1);
  const at::Tensor x = at::randn({3, 6});
  EXPECT_TRUE(module(x).allclose(at::rms_norm(x, {6}, {}, 1e-3), 1e-5, 1e-6));
}

TEST(Dropout, DrawsAnewAtEachCall) {
  Dropout module(0.5);
  const at::Tensor x = at::ones({1000});
  EXPECT_FALSE(module(x).equal(module(x)));
}

TEST(Dropout, ReplaysACall) {
  Dropout module(0.5);
  const at::Tensor x = at::ones({1000});
  module(x);
  const std::uint64_t calls = module.calls();
  const at::Tensor first = module(x);
  module.set_calls(calls);
  EXPECT_TRUE(module(x).equal(first));
}

TEST(Dropout, TwoModulesDrawIndependently) {
  auto a = std::make_shared<Dropout>(0.5);
  auto b = std::make_shared<Dropout>(0.5);
  Sequential both(a, b);
  init_weights(both, 1);
  const at::Tensor x = at::ones({1000});
  EXPECT_FALSE((*a)(x).equal((*b)(x)));
}

TEST(Dropout, TwoUninitialisedModulesDrawIndependently) {
  struct Both : Module<Both> {
    std::vector<at::Tensor> forward(const at::Tensor& x) { return {(*a)(x), (*b)(x)}; }
    Child<Dropout> a{*this, "a", 0.5}, b{*this, "b", 0.5};
  };
  const at::Tensor x = at::ones({1000});
  Both first;
  Both second;
  const auto masks = first(x);
  EXPECT_FALSE(masks[0].equal(masks[1]));
  const auto others = second(x);
  EXPECT_TRUE(masks[0].equal(others[0]) && masks[1].equal(others[1]));
}

/// Blocks; each calls its own dropout "drop".
struct DropBlock : Module<DropBlock> {
  at::Tensor forward(const at::Tensor& x) { return (*drop)(x); }
  Child<Dropout> drop{*this, "drop", 0.5};
};

TEST(Dropout, TakesItsNameInTheWholeModelAfterAPartWasAskedForNames) {
  const auto masks = [](bool ask_parts) {
    struct Two : Module<Two> {
      std::vector<at::Tensor> forward(const at::Tensor& x) { return {(*a)(x), (*b)(x)}; }
      Child<DropBlock> a{*this, "a"}, b{*this, "b"};
    };
    Two model;
    if (ask_parts) {
      model.a->named_slots();
      model.b->named_slots();
    }
    auto found = model(at::ones({1000}));
    EXPECT_EQ(model.b->drop->fqn(), "b.drop");
    return found;
  };
  const auto asked = masks(true), fresh = masks(false);
  EXPECT_FALSE(asked[0].equal(asked[1]));
  EXPECT_TRUE(asked[0].equal(fresh[0]) && asked[1].equal(fresh[1]));
}

TEST(Dropout, MadeWithinAForwardIsRefused) {
  class Makes : public Module<Makes> {
   public:
    at::Tensor forward(const at::Tensor& x) { return Dropout(0.5)(x); }
  };
  Makes module;
  EXPECT_ERROR(module(at::ones({4})), "no module has it registered", "give it to register_module");
}

TEST(Dropout, DoesNothingInEvaluation) {
  Dropout module(0.5);
  module.eval();
  const at::Tensor x = at::ones({10});
  EXPECT_TRUE(module(x).is_same(x));
}

TEST(Dropout, RefusesAProbabilityOfOne) {
  EXPECT_ERROR(Dropout(1.0), "probability 1 was asked for");
}

TEST(Sequential, RunsItsModulesInOrder) {
  auto a = std::make_shared<Linear>(3, 4);
  auto b = std::make_shared<Linear>(4, 2);
  Sequential both(a, b);
  init_weights(both, 1);
  const at::Tensor x = at::randn({5, 3});
  EXPECT_TRUE(both(x).equal((*b)((*a)(x))));
  EXPECT_EQ(both.named_slots()[2].first, "1.weight");
}

TEST(ModuleList, GivesItsModulesByType) {
  ModuleList list;
  auto module = list.push_back(std::make_shared<Linear>(3, 4));
  EXPECT_EQ(list.at<Linear>(0), module);
  EXPECT_ERROR(list.at<Embedding>(0), "not of the type asked for");
  EXPECT_ERROR(list.at<Linear>(1), "module 1 of a ModuleList of 1");
}

TEST(LayersOfEachKind, TrainsAllItsParameters) {
  testing::LayersOfEachKind model;
  init_weights(model, 1);
  model(at::tensor({0, 3, 6}, at::kLong)).square().sum().backward();
  for (const auto& [name, slot] : model.named_slots()) {
    ASSERT_TRUE(slot->get().grad().defined()) << name;
    EXPECT_GT(slot->get().grad().abs().sum().item<double>(), 0.0) << name;
  }
}

}  // namespace
}  // namespace tessera::nn
