#include "tessera/nn/hooked.h"
#include "nn/slot_names.h"
#include "testing/errors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tessera/nn/child.h"
#include "tessera/nn/linear.h"

namespace tessera::nn {
namespace {

struct ScaleImpl : torch::nn::Module {
  ScaleImpl() : scale(register_parameter("scale", at::ones({2}))) {}
  at::Tensor forward(const at::Tensor& x) { return x * scale; }
  at::Tensor scale;
};
TORCH_MODULE(Scale);

/// Holds a module of a class that is not libtorch's.
struct NestsImpl : torch::nn::Module {
  NestsImpl() { inner = register_module("inner", Scale()); }
  at::Tensor forward(const at::Tensor& x) { return inner->forward(x); }
  Scale inner{nullptr};
};
TORCH_MODULE(Nests);

/// A module at two places, and one of tessera::nn.
struct SharesImpl : torch::nn::Module {
  SharesImpl() {
    a = register_module("a", torch::nn::Linear(2, 2));
    register_module("b", a);
    ours = register_module("ours", std::make_shared<Linear>(2, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return (*ours)(a(x)); }
  torch::nn::Linear a{nullptr};
  std::shared_ptr<Linear> ours;
};
TORCH_MODULE(Shares);

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
  EXPECT_ERROR(Hooked<Forgotten>(), "parameter 'scale'", "nn::kSlotMembers");
}

TEST(Hooked, PassesOnTrainAndEval) {
  Hooked<torch::nn::Linear> module(torch::nn::LinearOptions(2, 2));
  module.eval();
  EXPECT_FALSE(module.held().is_training());
}

TEST(Hooked, ReachesParametersOfNestedModules) {
  const auto options = torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(12);
  const Hooked<torch::nn::TransformerEncoderLayer> module(options);
  const torch::nn::TransformerEncoderLayer stock(options);
  auto found = testing::names_of(module.named_slots());
  auto expected = stock->named_parameters().keys();
  std::ranges::sort(found);
  std::ranges::sort(expected);
  EXPECT_EQ(found, expected);
  const Hooked<torch::nn::TransformerEncoder> stack(torch::nn::TransformerEncoderOptions(stock, 2));
  EXPECT_EQ(stack.named_slots().size(), 2 * found.size());
  EXPECT_EQ(stack.named_slots().back().first.substr(0, 9), "layers.1.");
}

TEST(Hooked, ComputesWithWhatIsPutIntoNestedSlots) {
  Hooked<torch::nn::TransformerEncoderLayer> module(
      torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(12).dropout(0));
  torch::nn::TransformerEncoderLayer stock(
      torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(12).dropout(0));
  for (const auto& [name, slot] : module.named_slots()) {
    slot->set(stock->named_parameters()[name].detach().clone().requires_grad_());
  }
  const at::Tensor x = at::randn({3, 2, 8});
  const at::Tensor y = module(x);
  EXPECT_TRUE(y.allclose(stock(x)));
  y.square().sum().backward();
  stock(x).square().sum().backward();
  for (const auto& [name, slot] : module.named_slots()) {
    EXPECT_TRUE(slot->get().grad().allclose(stock->named_parameters()[name].grad(), 1e-4, 1e-5))
        << name;
  }
}

TEST(Hooked, ReachesWhatIsNestedOnce) {
  Hooked<Shares> module;
  EXPECT_EQ(testing::names_of(module.named_slots()),
            (std::vector<std::string>{"a.weight", "a.bias", "ours.weight", "ours.bias"}));
}

TEST(Hooked, ReachesTheParametersOfAnAttention) {
  const Hooked<torch::nn::MultiheadAttention> module(torch::nn::MultiheadAttentionOptions(8, 2));
  EXPECT_EQ(testing::names_of(module.named_slots()),
            (std::vector<std::string>{"in_proj_weight", "in_proj_bias", "out_proj.weight",
                                      "out_proj.bias"}));
}

// A cast in the forward, as for a module of one's own, cannot be asked for.
TEST(Hooked, SaysWhatToDoAboutABufferOfAnotherTypeThanParameters) {
  struct Normed : Module<Normed> {
    at::Tensor forward(const at::Tensor& x) { return norm(x); }
    Child<Hooked<torch::nn::BatchNorm1d>> norm{*this, "norm", 3};
  };
  Normed module;
  // As a unit of mixed precision has gathered them.
  for (const auto& [name, slot] : module.named_slots()) {
    slot->swap(slot->get().detach().to(at::kBFloat16));
  }
  EXPECT_THROWN(c10::Error, module(at::ones({2, 3}, at::kBFloat16)),
                "'norm.running_mean' is of type Float, and parameters are BFloat16",
                "an FSDP unit of its own, whose mp_policy has param_dtype = at::kFloat",
                "and restore_input_dtype = true");
}

TEST(Hooked, RefusesNestedModulesThatItCannotReach) {
  EXPECT_ERROR(Hooked<Nests>(), "parameter 'inner.scale'", "derive it from nn::Module");
}

}  // namespace
}  // namespace tessera::nn
