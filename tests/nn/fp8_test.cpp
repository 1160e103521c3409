// Which Linears are converted, and what they compute; the products are tested in tests/kernels.
#include "tessera/nn/fp8.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "nn/graphs.h"
#include "tessera/kernels/fp8.h"
#include "tessera/nn/activation_checkpointing.h"
#include "tessera/nn/child.h"
#include "tessera/nn/fused_linear.h"
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
  EXPECT_TRUE(y.equal(kernels::fp8_linear(x.detach(), weight).add(*model.up->bias)));
  const at::Tensor gradient = uniform_values({2, 5, 32}, 2);
  y.backward(gradient);
  EXPECT_TRUE(x.grad().equal(kernels::fp8_linear_input_grad(gradient, weight)));
  EXPECT_TRUE(
      model.up->weight->grad().equal(kernels::fp8_linear_weight_grad(gradient, x.detach())));
  EXPECT_TRUE(model.up->bias->grad().allclose(gradient.flatten(0, 1).sum(0)));
}

TEST(Fp8, ConvertsAFusedLinear) {
  testing::Filled<FusedLinear> fused(16, std::vector<FusedPart>{{"gate", 16}, {"up", 16}},
                                     FusedLinearOptions{.bias = false});
  EXPECT_EQ(convert_to_fp8(fused).converted, Names{""});
  const at::Tensor x = uniform_values({3, 16}, 1);
  EXPECT_TRUE(fused.split(fused(x))[1].equal(
      kernels::fp8_linear(x, fused.weight->detach().narrow(0, 16, 16))));
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
  EXPECT_TRUE(y.equal(kernels::fp8_linear(x.detach(), linear.weight->detach()).add(term)));
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

}  // namespace
}  // namespace tessera::nn
