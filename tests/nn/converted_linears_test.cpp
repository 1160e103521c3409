// fp8 products and LoRA adapters.

#include <ATen/ops/linear.h>
#include <ATen/ops/tanh.h>

#include <cmath>

#include "nn/graphs.h"
#include "tessera/kernels/detail/fp8.h"
#include "tessera/nn/activation_checkpointing.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/detail/lora.h"
#include "tessera/nn/detail/records.h"
#include "tessera/nn/fp8.h"
#include "tessera/nn/freeze.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/lora.h"
#include "testing/errors.h"
#include "testing/module_values.h"
#include "testing/values.h"

namespace tessera::nn {
namespace {

using testing::uniform_values;
using Names = std::vector<std::string>;

struct Mlp : Module<Mlp> {
  at::Tensor forward(const at::Tensor& x) { return (*head)((*down)(at::tanh((*up)(x)))); }
  Child<Linear> up{*this, "up", 16, 32};
  Child<Linear> down{*this, "down", 32, 16, LinearOptions{.bias = false}};
  Child<Linear> odd{*this, "odd", 16, 24};
  Child<Linear> head{*this, "head", 16, 48};
};

TEST(Fp8, ConvertsLinearsByNameAndSize) {
  Mlp model;
  const Fp8Conversion conversion = convert_to_fp8(model, {.exclude = {"h*d"}});
  EXPECT_EQ(conversion.converted, (Names{"up", "down"}));
  EXPECT_EQ(conversion.left, (Names{"odd", "head"}));
  EXPECT_TRUE(is_fp8(*model.up));
  EXPECT_FALSE(is_fp8(*model.head));
  EXPECT_EQ(testing::names_of(fp8_weights(model)), (Names{"up.weight", "down.weight"}));
  Mlp larger;
  EXPECT_EQ(convert_to_fp8(larger, {.multiple_of = 32}).converted, Names{});
}

TEST(Fp8, LeavesATiedWeight) {
  Mlp model;
  const Linear other(16, 32);
  model.up->tie_slot("weight", other.slot("weight"));
  EXPECT_EQ(convert_to_fp8(model).left, (Names{"up", "odd"}));
}

TEST(Fp8, ComputesAndDifferentiatesInEightBits) {
  testing::Filled<Mlp> model;
  convert_to_fp8(model);
  const at::Tensor x = uniform_values({2, 5, 16}, 1).requires_grad_();
  const at::Tensor y = (*model.up)(x);
  const at::Tensor weight = model.up->weight->detach();
  EXPECT_EQUAL(y, kernels::fp8_linear(x.detach(), weight).add(*model.up->bias));
  const at::Tensor gradient = uniform_values({2, 5, 32}, 2);
  y.backward(gradient);
  EXPECT_EQUAL(x.grad(), kernels::fp8_linear_input_grad(gradient, weight));
  EXPECT_EQUAL(model.up->weight->grad(), kernels::fp8_linear_weight_grad(gradient, x.detach()));
  EXPECT_CLOSE(model.up->bias->grad(), gradient.flatten(0, 1).sum(0));
}

TEST(Fp8, ConvertsAFusedLinear) {
  testing::Filled<FusedLinear> fused(16, std::vector<FusedPart>{{"gate", 16}, {"up", 16}},
                                     FusedLinearOptions{.bias = false});
  EXPECT_EQ(convert_to_fp8(fused).converted, Names{""});
  const at::Tensor x = uniform_values({3, 16}, 1);
  EXPECT_EQUAL(fused.split(fused(x))[1],
               kernels::fp8_linear(x, fused.weight->detach().narrow(0, 16, 16)));
}

TEST(Fp8, KeepsAnAdapterInItsType) {
  testing::Filled<Linear> linear(16, 32, LinearOptions{.bias = false});
  convert_to_fp8(linear);
  apply_lora(linear, {.rank = 16, .alpha = 16, .targets = {""}});
  const auto branch = linear.attached<LoraBranch>();
  testing::fill(*branch->a);
  testing::fill(*branch->b);
  EXPECT_FALSE(is_fp8(*branch->a));
  const at::Tensor x = uniform_values({3, 16}, 1).requires_grad_();
  const at::Tensor y = linear(x);
  const at::Tensor term = at::linear(at::linear(x, *branch->a->weight), *branch->b->weight);
  EXPECT_EQUAL(y, kernels::fp8_linear(x.detach(), linear.weight->detach()).add(term));
  y.sum().backward();
  EXPECT_FALSE(linear.weight->grad().defined());
  EXPECT_TRUE(branch->b->weight->grad().defined());
}

TEST(Fp8, IsAMatrixProductForActivationCheckpointing) {
  testing::Filled<Mlp> model;
  convert_to_fp8(model);
  const auto counts = std::make_shared<CheckpointCounts>();
  apply_activation_checkpointing(
      model,
      {.select = named(""), .options = {.policy = save_matmuls_and_attention(), .counts = counts}});
  model(uniform_values({4, 16}, 1)).sum().backward();
  EXPECT_EQ(counts->kept_operators, 3);
}

TEST(Fp8, RefusesWhatItCannotConvert) {
  Mlp model;
  EXPECT_ERROR(convert_to_fp8(model, {.exclude = {"lm_head"}}), "'lm_head' matches no nn::Linear");
  EXPECT_ERROR(convert_to_fp8(model, {.multiple_of = 0}), "multiple_of is 0");
  EXPECT_FALSE(is_fp8(*model.up));
  convert_to_fp8(model);
  EXPECT_ERROR(convert_to_fp8(model), "'up' is converted already");
  Mlp adapted;
  apply_lora(adapted, {.rank = 2, .targets = {"up"}});
  EXPECT_ERROR(convert_to_fp8(adapted), "'up' has an adapter", "before apply_lora");
  testing::Filled<Linear> wide(16, 16);
  convert_to_fp8(wide);
  EXPECT_ERROR(wide(uniform_values({2, 16}, 1).to(at::kDouble)), "of types Double and Float");
}

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
  EXPECT_EQUAL(adapted(x), plain(x));
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
  EXPECT_CLOSE(y, at::linear(x, weight, *linear.bias), 1e-5, 1e-6);
  merge_lora(linear);
  EXPECT_TRUE(linear.weight->allclose(weight, 1e-5, 1e-6));
  EXPECT_CLOSE(linear(x), y, 1e-5, 1e-6);
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
  EXPECT_EQUAL(*model.up->weight, loaded);
  const auto branch = model.up->attached<LoraBranch>();
  EXPECT_EQUAL(*branch->a->weight, *fresh.up->attached<LoraBranch>()->a->weight);
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
