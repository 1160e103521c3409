#include "tessera/nn/hooked.h"
#include "testing/errors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

namespace tessera::nn {
namespace {

struct ScaleImpl : torch::nn::Module {
  ScaleImpl() : scale(register_parameter("scale", at::ones({2}))) {}
  at::Tensor forward(const at::Tensor& x) { return x * scale; }
  at::Tensor scale;
};
TORCH_MODULE(Scale);

struct ForgottenImpl : ScaleImpl {};
TORCH_MODULE(Forgotten);

}  // namespace

template <>
inline constexpr std::array kSlotMembers<ScaleImpl>{
    SlotMember<ScaleImpl>{"scale", &ScaleImpl::scale}};
template <>
inline constexpr std::array<SlotMember<ForgottenImpl>, 0> kSlotMembers<ForgottenImpl>{};

namespace {

TEST(Hooked, ComputesAsTheHeldModule) {
  Hooked<torch::nn::Linear> module(torch::nn::LinearOptions(3, 2));
  const at::Tensor x = at::randn({4, 3});
  EXPECT_TRUE(module(x).equal(module.held().forward(x)));
}

TEST(Hooked, HoldsModulesWithoutParameters) {
  Hooked<torch::nn::ReLU> module;
  int runs = 0;
  module.add_forward_pre_hook([&](ModuleBase&, TensorList) { ++runs; });
  EXPECT_TRUE(module(at::tensor({-1.0, 2.0})).equal(at::tensor({0.0, 2.0})));
  EXPECT_EQ(runs, 1);
  EXPECT_TRUE(module.named_slots().empty());
}

TEST(Hooked, RunsHooks) {
  Hooked<torch::nn::Linear> module(torch::nn::LinearOptions(3, 2));
  int runs = 0;
  module.add_forward_pre_hook([&](ModuleBase&, TensorList) { ++runs; });
  module.add_forward_hook([&](ModuleBase&, TensorList) { ++runs; });
  module(at::randn({4, 3}));
  EXPECT_EQ(runs, 2);
}

TEST(Hooked, HasSlotsOfTheSameNames) {
  Hooked<torch::nn::Linear> module(torch::nn::LinearOptions(3, 2));
  ASSERT_EQ(module.named_slots().size(), 2U);
  EXPECT_EQ(module.named_slots()[0].first, "weight");
  EXPECT_EQ(module.named_parameters().size(), 2U);
}

TEST(Hooked, FindsWeightAndBiasOfStockModules) {
  EXPECT_EQ(Hooked<torch::nn::Conv2d>(torch::nn::Conv2dOptions(1, 2, 3)).named_slots().size(), 2U);
  EXPECT_EQ(Hooked<torch::nn::LayerNorm>(torch::nn::LayerNormOptions({4})).named_slots().size(),
            2U);
  EXPECT_EQ(Hooked<torch::nn::GroupNorm>(torch::nn::GroupNormOptions(1, 4)).named_slots().size(),
            2U);
  EXPECT_EQ(Hooked<torch::nn::Bilinear>(torch::nn::BilinearOptions(2, 2, 2)).named_slots().size(),
            2U);
  EXPECT_EQ(Hooked<torch::nn::Embedding>(torch::nn::EmbeddingOptions(4, 2)).named_slots().size(),
            1U);
}

TEST(Hooked, SwapReachesTheHeldModule) {
  Hooked<torch::nn::Linear> module(torch::nn::LinearOptions(2, 2).bias(false));
  module.slot("weight")->set(at::eye(2).requires_grad_());
  const at::Tensor x = at::randn({4, 2});
  EXPECT_TRUE(module(x).equal(x));
}

TEST(Hooked, GradientsArriveInTheSlot) {
  Hooked<torch::nn::Linear> module(torch::nn::LinearOptions(2, 2).bias(false));
  module(at::ones({1, 2})).sum().backward();
  EXPECT_TRUE(module.slot("weight")->get().grad().equal(at::ones({2, 2})));
}

TEST(Hooked, HoldsAUsersModule) {
  Hooked<Scale> module;
  module.slot("scale")->set(at::full({2}, 3.0));
  EXPECT_TRUE(module(at::ones({2})).equal(at::full({2}, 3.0)));
}

TEST(Hooked, RefusesAModuleWhoseParametersAreNotNamed) {
  EXPECT_ERROR(Hooked<Forgotten>(), "is not in its kSlotMembers");
}

TEST(Hooked, PassesOnTrainAndEval) {
  Hooked<torch::nn::Linear> module(torch::nn::LinearOptions(2, 2));
  module.eval();
  EXPECT_FALSE(module.held().is_training());
}

}  // namespace
}  // namespace tessera::nn
