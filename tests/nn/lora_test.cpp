// Adapters and frozen parameters on one rank. On meshes: tests/tensor_parallel/lora_test.cpp.
#include "tessera/nn/lora.h"
#include "nn/graphs.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "tessera/nn/child.h"
#include "tessera/nn/freeze.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/meta_device.h"
#include "tessera/nn/norm.h"
#include "testing/errors.h"
#include "testing/module_values.h"
#include "testing/values.h"

namespace tessera::nn {
namespace {

using testing::uniform_values;

struct AdaptedMlp final : Module<AdaptedMlp> {
  at::Tensor forward(const at::Tensor& x) { return (*down)(at::tanh((*norm)((*up)(x)))); }
  // A table as of a model that knows of no adapters.
  void reset_parameters(const InitContext& init) override {
    init.fill(*this, {{"**.weight", init::normal(0, 0.5)}});
  }
  Child<Linear> up{*this, "up", 5, 7};
  Child<RMSNorm> norm{*this, "norm", 7};
  Child<Linear> down{*this, "down", 7, 5};
};

TEST(Lora, AddsNothingAtFirstBesideFrozenWeights) {
  AdaptedMlp plain, adapted;
  init_weights(plain, 3);
  apply_lora(adapted, {.rank = 2, .alpha = 6, .targets = {"up", "d*"}, .dropout = 0.1});
  init_weights(adapted, 3);
  const at::Tensor x = uniform_values({4, 5}, 0.5);
  EXPECT_TRUE(at::equal(adapted(x), plain(x)));
  EXPECT_EQ(testing::names_of(lora_slots(adapted)),
            (std::vector<std::string>{"up.lora_A.weight", "up.lora_B.weight", "down.lora_A.weight",
                                      "down.lora_B.weight"}));
  const auto branch = adapted.up->attached<LoraBranch>();
  EXPECT_EQ(branch->a->weight->sizes(), (std::vector<std::int64_t>{2, 5}));
  EXPECT_EQ(branch->b->weight->sizes(), (std::vector<std::int64_t>{7, 2}));
  // Kaiming-uniform as PyTorch's Linear has it.
  const double largest = branch->a->weight->abs().max().item<double>();
  EXPECT_LE(largest, 1 / std::sqrt(5.0));
  EXPECT_GT(largest, 0.5 / std::sqrt(5.0));
  for (const auto& [name, slot] : adapted.named_slots()) {
    EXPECT_EQ(slot->get().requires_grad(), name.find("lora_") != name.npos) << name;
  }
}

TEST(Lora, AddsItsProductAndMergesIntoTheWeight) {
  Linear linear(5, 7);
  apply_lora(linear, {.rank = 2, .alpha = 3, .targets = {""}});
  testing::fill(linear);
  const at::Tensor x = uniform_values({4, 5}, 0.5);
  const auto branch = linear.attached<LoraBranch>();
  const at::Tensor weight =
      linear.weight->detach() + 1.5 * branch->b->weight->mm(branch->a->weight).detach();
  const at::Tensor y = linear(x).detach();
  EXPECT_TRUE(y.allclose(at::linear(x, weight, *linear.bias), 1e-5, 1e-6));
  merge_lora(linear);
  EXPECT_TRUE(linear.weight->allclose(weight, 1e-5, 1e-6));
  EXPECT_TRUE(linear(x).allclose(y, 1e-5, 1e-6));
  // Nothing is added twice.
  merge_lora(linear);
  EXPECT_TRUE(linear.weight->allclose(weight, 1e-5, 1e-6));
}

TEST(Lora, IsMadeBesideMetaWeightsAndInTheirType) {
  std::shared_ptr<AdaptedMlp> model;
  {
    const MetaDevice meta;
    model = std::make_shared<AdaptedMlp>();
  }
  apply_lora(*model, {.targets = {"up"}});
  EXPECT_TRUE(model->up->attached<LoraBranch>()->a->weight->is_meta());
  Linear wide(5, 7);
  wide.to(at::kDouble);
  apply_lora(wide, {.targets = {""}});
  EXPECT_EQ(wide.attached<LoraBranch>()->b->weight->scalar_type(), at::kDouble);
}

TEST(Lora, IsFilledWhereALoadHasLeftItOut) {
  AdaptedMlp model, fresh;
  testing::fill(model);
  const at::Tensor loaded = model.up->weight->detach().clone();
  apply_lora(model, {.rank = 2, .targets = {"up"}});
  init_unfilled(model, 3);
  apply_lora(fresh, {.rank = 2, .targets = {"up"}});
  init_weights(fresh, 3);
  EXPECT_TRUE(at::equal(*model.up->weight, loaded));
  const auto branch = model.up->attached<LoraBranch>();
  EXPECT_TRUE(at::equal(*branch->a->weight, *fresh.up->attached<LoraBranch>()->a->weight));
  EXPECT_EQ(branch->b->weight->abs().max().item<double>(), 0);
}

TEST(Lora, RefusesWhatItCannotAdapt) {
  AdaptedMlp model;
  EXPECT_ERROR(apply_lora(model, {.rank = 0, .targets = {"up"}}), "rank 0", "1 or more");
  EXPECT_ERROR(apply_lora(model, {.targets = {"up"}, .dropout = 1}), "dropout 1", "[0, 1)");
  EXPECT_ERROR(apply_lora(model, {}), "no targets", "**.q_proj");
  EXPECT_ERROR(apply_lora(model, {.targets = {"up", "norm"}}), "'norm'", "no nn::Linear",
               "AdaptedMlp");
  EXPECT_TRUE(lora_slots(model).empty());
  EXPECT_TRUE(model.norm->weight->requires_grad());
  EXPECT_ERROR(merge_lora(model), "no adapters", "apply_lora first");
  apply_lora(model, {.targets = {"up"}});
  EXPECT_ERROR(apply_lora(model, {.targets = {"*"}}), "'up'", "has an adapter");
  EXPECT_ERROR(merge_lora(model), "up.weight", "has no values");
  AdaptedMlp tied;
  tied.up->tie_slot("weight", std::make_shared<Linear>(5, 7)->slot("weight"));
  Linear other(5, 7);
  other.tie_slot("weight", tied.up->slot("weight"));
  EXPECT_ERROR(apply_lora(tied, {.targets = {"up"}}), "'up'", "tied");
}

TEST(Freeze, TakesParametersByAnyOfTheirNames) {
  AdaptedMlp model;
  freeze(model, {"norm.*", "down.bias"});
  for (const auto& [name, slot] : model.named_slots()) {
    EXPECT_EQ(slot->get().requires_grad(), name != "norm.weight" && name != "down.bias") << name;
  }
  auto same = std::make_shared<Linear>(5, 7);
  same->tie_slot("weight", model.up->slot("weight"));
  model.register_module("same", same);
  freeze(model, {"same.weight"});
  EXPECT_FALSE(model.up->weight->requires_grad());
  freeze(model, {"**"});
  for (const auto& [name, slot] : model.named_slots()) {
    EXPECT_FALSE(slot->get().requires_grad()) << name;
  }
}

TEST(Freeze, RefusesAPatternThatMatchesNothing) {
  AdaptedMlp model;
  EXPECT_ERROR(freeze(model, {"up.*", "layers.*"}), "'layers.*'", "5 parameters", "'up.weight'");
  EXPECT_TRUE(model.up->weight->requires_grad());
}

}  // namespace
}  // namespace tessera::nn
