// Tests nn::Hooked and nn::adopt on one rank: names, children, initial values, refusals.

#include <torch/nn/modules/container/parameterlist.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformer.h>
#include <torch/optim/sgd.h>

#include <cmath>

#include "nn/graphs.h"
#include "testing/models.h"
#include "testing/module_values.h"

namespace tessera::nn {
namespace {

struct ScaleImpl : torch::nn::Module {
  ScaleImpl() : scale(register_parameter("scale", at::ones({2}))) {}
  at::Tensor forward(const at::Tensor& x) { return x * scale; }
  at::Tensor scale;
};
TORCH_MODULE(Scale);

/// Has a child of class Scale, which is defined by this test, not by libtorch.
struct NestsImpl : torch::nn::Module {
  NestsImpl() { inner = register_module("inner", Scale()); }
  at::Tensor forward(const at::Tensor& x) { return inner->forward(x); }
  Scale inner{nullptr};
};
TORCH_MODULE(Nests);

/// A libtorch module that registers one child twice, and that has a child of tessera::nn.
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
inline constexpr std::array<SlotMember<ForgottenImpl>, 0> kSlotMembers<ForgottenImpl>{};

namespace {

TEST(Hooked, ComputesLikeItsModule) {
  Hooked<torch::nn::Linear> module(torch::nn::LinearOptions(3, 2));
  const at::Tensor x = at::randn({4, 3});
  EXPECT_EQUAL(module(x), module.held().forward(x));
}

TEST(Hooked, SupportsModulesWithoutParameters) {
  Hooked<torch::nn::ReLU> module;
  int runs = 0;
  module.add_forward_pre_hook([&](ModuleBase&, TensorList) { ++runs; });
  EXPECT_EQUAL(module(at::tensor({-1.0, 2.0})), at::tensor({0.0, 2.0}));
  EXPECT_EQ(runs, 1);
  EXPECT_TRUE(module.named_slots().empty());
}

TEST(Hooked, FindsWeightAndBiasOfStockModules) {
  const auto count = [](const auto& module) { return module.named_slots().size(); };
  EXPECT_EQ(count(Hooked<torch::nn::Conv2d>(torch::nn::Conv2dOptions(1, 2, 3))), 2U);
  EXPECT_EQ(count(Hooked<torch::nn::LayerNorm>(torch::nn::LayerNormOptions({4}))), 2U);
  EXPECT_EQ(count(Hooked<torch::nn::GroupNorm>(torch::nn::GroupNormOptions(1, 4))), 2U);
  EXPECT_EQ(count(Hooked<torch::nn::Bilinear>(torch::nn::BilinearOptions(2, 2, 2))), 2U);
  EXPECT_EQ(count(Hooked<torch::nn::Embedding>(torch::nn::EmbeddingOptions(4, 2))), 1U);
}

TEST(Hooked, UsesTensorsSetInNestedSlots) {
  Hooked<torch::nn::TransformerEncoderLayer> module(
      torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(12).dropout(0));
  torch::nn::TransformerEncoderLayer stock(
      torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(12).dropout(0));
  for (const auto& [name, slot] : module.named_slots()) {
    slot->set(stock->named_parameters()[name].detach().clone().requires_grad_());
  }
  const at::Tensor x = at::randn({3, 2, 8});
  const at::Tensor y = module(x);
  EXPECT_CLOSE(y, stock(x));
  y.square().sum().backward();
  stock(x).square().sum().backward();
  for (const auto& [name, slot] : module.named_slots()) {
    EXPECT_CLOSE(slot->get().grad(), stock->named_parameters()[name].grad(), 1e-4, 1e-5) << name;
  }
}

TEST(Hooked, FindsNestedParametersOnce) {
  Hooked<Shares> module;
  EXPECT_EQ(testing::names_of(module.named_slots()),
            (std::vector<std::string>{"a.weight", "a.bias", "ours.weight", "ours.bias"}));
}

TEST(Hooked, RefusesUnknownParameters) {
  EXPECT_ERROR(Hooked<Forgotten>(), "parameter 'scale'", "nn::kSlotMembers");
  EXPECT_ERROR(Hooked<Nests>(), "parameter 'inner.scale'", "from nn::Module");
}

namespace adopt_test {

template <class Make>
auto initialised(const Make& make) {
  const auto model = [&] {
    const MetaDevice meta;
    return adopt(make());
  }();
  to_empty(*model, at::kCPU);
  init_weights(*model, 1);
  return model;
}

template <class M>
at::Tensor value(const M& model, const std::string& fqn) {
  return model->named_parameters()[fqn].detach();
}

TEST(Adopt, KeepsTheNamesOfLibtorch) {
  const auto encoder = testing::torch_encoder();
  EXPECT_EQ(testing::names_of(adopt(encoder)->named_slots()), encoder->named_parameters().keys());
  const auto net = std::make_shared<testing::TorchConvNet>();
  EXPECT_EQ(testing::names_of(adopt(net)->named_slots()), net->named_parameters().keys());
  const auto buffers = std::make_shared<testing::TorchWithBuffers>();
  EXPECT_EQ(adopt(buffers)->named_buffers().keys(), buffers->named_buffers().keys());
}

TEST(Adopt, KeepsTheParameterTensorsOfExistingOptimizers) {
  const auto net = std::make_shared<testing::TorchMlp>();
  const at::Tensor before = net->up->weight;
  torch::optim::SGD sgd(net->parameters(), 0.1);
  const auto model = adopt(net);
  (*model)(at::ones({2, 5})).sum().backward();
  const at::Tensor old = before.detach().clone();
  sgd.step();
  EXPECT_TRUE(model->named_parameters()["up.weight"].is_same(before));
  EXPECT_FALSE(before.equal(old));
}

TEST(Adopt, ReplacingATensorReachesTheOriginalModule) {
  const auto net = std::make_shared<testing::TorchMlp>();
  const auto model = adopt(net);
  for (const auto& [name, slot] : model->named_slots()) {
    slot->set(at::zeros_like(slot->get()).requires_grad_());
    EXPECT_TRUE(net->named_parameters()[name].is_same(slot->get())) << name;
  }
  EXPECT_EQUAL((*model)(at::ones({2, 5})), at::zeros({2, 3}));
}

TEST(Adopt, KeepsFrozenParametersAndEvalMode) {
  const auto net = std::make_shared<testing::TorchWithBuffers>();
  net->fc->weight.set_requires_grad(false);
  net->norm->eval();
  const auto model = adopt(net);
  EXPECT_FALSE(model->named_parameters()["fc.weight"].requires_grad());
  EXPECT_TRUE(model->is_training());
  EXPECT_FALSE(net->norm->is_training());
  model->eval();
  EXPECT_FALSE(net->is_training());
}

TEST(Adopt, GivesATiedParameterOneSlot) {
  const auto net = std::make_shared<testing::TorchMlp>();
  net->replace_module("down", net->up.ptr());
  EXPECT_EQ(adopt(net)->named_slots().size(), 4U);
}

TEST(Adopt, RefusesAnAdoptedModule) {
  const auto net = std::make_shared<testing::TorchMlp>();
  {
    const auto model = adopt(net);
    EXPECT_ERROR(adopt(net), "a tessera::testing::TorchMlp that was adopted before");
  }
  EXPECT_EQ(adopt(net)->named_slots().size(), 6U);
}

TEST(Adopt, ListsOfParametersReadTheSlots) {
  const auto list = std::make_shared<torch::nn::ParameterListImpl>(at::ones({2}), at::ones({3}));
  struct Sum : torch::nn::Module {
    explicit Sum(std::shared_ptr<torch::nn::ParameterListImpl> from)
        : list(register_module("list", std::move(from))),
          lstm(register_module("lstm", torch::nn::LSTM(3, 2))) {}
    at::Tensor forward(const at::Tensor& x) {
      return std::get<0>(lstm(x)).sum() + (*list)[0].sum();
    }
    std::shared_ptr<torch::nn::ParameterListImpl> list;
    torch::nn::LSTM lstm;
  };
  const auto model = adopt(std::make_shared<Sum>(list));
  for (const auto& [name, slot] : model->named_slots()) {
    slot->set(at::zeros_like(slot->get()).requires_grad_());
  }
  const at::Tensor y = (*model)(at::ones({4, 1, 3}));
  EXPECT_EQ(y.item<float>(), 0);
  y.backward();
  EXPECT_TRUE(model->named_parameters()["lstm.weight_ih_l0"].grad().defined());
  EXPECT_EQUAL(model->named_parameters()["list.0"].grad(), at::ones({2}));
}

TEST(Adopt, SupportsParametersInNamedMembers) {
  const auto model = adopt<testing::TorchScale>(std::make_shared<testing::TorchScaled>());
  model->named_slots().back().second->set(at::zeros({3}).requires_grad_());
  EXPECT_EQUAL((*model)(at::ones({2, 5})), at::zeros({2, 3}));
}

TEST(Adopt, RefusesInvalidModules) {
  EXPECT_ERROR(adopt(std::make_shared<testing::TorchScaled>()),
               "parameter 'gain.scale' of a tessera::testing::TorchScale", "nn::kSlotMembers",
               "from nn::Module");
  const auto net = std::make_shared<testing::TorchMlp>();
  net->up->weight = at::ones({7, 5}).requires_grad_();
  EXPECT_ERROR(adopt(net), "'up.weight'", "torch::nn::LinearImpl", "tie_slot");
  EXPECT_ERROR(adopt(std::shared_ptr<testing::TorchMlp>()), "null module");
  EXPECT_ERROR(adopt(torch::nn::Linear(nullptr)), "empty holder");
  {
    const MetaDevice meta;
    EXPECT_ERROR(adopt(std::make_shared<testing::TorchWithBuffers>()), "buffer 'shift'",
                 "outside the MetaDevice scope");
  }
  const auto model = adopt(testing::torch_encoder());
  EXPECT_ERROR(apply_activation_checkpointing(*model, named("layers.*")),
               "selects 'layers.0', a torch::nn::TransformerEncoderLayerImpl", "without hooks");
}

// Expects a parameter drawn uniformly from [-bound, bound], as by libtorch's reset_parameters().
// The largest absolute value must exceed `part` * bound.
void expect_bound(const auto& model, const std::string& name, double bound, double part) {
  const double largest = value(model, name).abs().max().template item<double>();
  EXPECT_LE(largest, bound) << name;
  EXPECT_GE(largest, part * bound) << name;
}

TEST(Adopt, InitializesLinearsAndConvolutionsLikeLibtorch) {
  const auto model = initialised([] { return std::make_shared<testing::TorchConvNet>(); });
  for (const auto& [name, inputs] :
       {std::pair("first.weight", 18), std::pair("first.bias", 18), std::pair("head.weight", 16)}) {
    expect_bound(model, name, 1 / std::sqrt(inputs), 0.5);
  }
}

TEST(Adopt, InitializesNormsAndStatisticsLikeLibtorch) {
  const auto model =
      initialised([] { return torch::nn::Sequential(torch::nn::BatchNorm1d(3)).ptr(); });
  EXPECT_EQUAL(value(model, "0.weight"), at::ones({3}));
  EXPECT_EQUAL(value(model, "0.bias"), at::zeros({3}));
  (*model)(uniform_values({4, 3}, 2));
  EXPECT_FALSE(model->named_buffers()["0.running_var"].equal(at::ones({3})));
  init_buffers(*model);
  EXPECT_EQ(model->named_buffers()["0.num_batches_tracked"].item<int>(), 1);
  init_weights(*model, 2);
  EXPECT_EQUAL(model->named_buffers()["0.running_mean"], at::zeros({3}));
  EXPECT_EQUAL(model->named_buffers()["0.running_var"], at::ones({3}));
  EXPECT_EQ(model->named_buffers()["0.num_batches_tracked"].item<int>(), 0);
}

TEST(Adopt, InitializesEmbeddingsExceptThePaddingRow) {
  const auto model = initialised([] {
    return torch::nn::Embedding(torch::nn::EmbeddingOptions(200, 10).padding_idx(-2)).ptr();
  });
  const at::Tensor weight = value(model, "weight");
  EXPECT_NEAR(weight.std().item<double>(), 1, 0.1);
  EXPECT_EQUAL(weight[198], at::zeros({10}));
  EXPECT_FALSE(weight[197].equal(at::zeros({10})));
}

TEST(Adopt, InitializesAttentionAndTransformersLikeLibtorch) {
  const auto encoder = initialised([] { return testing::torch_encoder().ptr(); });
  const std::string attention = "layers.0.self_attn.";
  expect_bound(encoder, attention + "in_proj_weight", std::sqrt(6.0 / (8 + 24)), 0.9);
  EXPECT_EQUAL(value(encoder, attention + "in_proj_bias"), at::zeros({24}));
  EXPECT_EQUAL(value(encoder, attention + "out_proj.bias"), at::zeros({8}));
  const auto transformer = initialised([] {
    return torch::nn::Transformer(torch::nn::TransformerOptions(8, 2, 1, 1).dim_feedforward(40))
        .ptr();
  });
  // libtorch's Transformer draws its matrices Xavier-uniform, unlike nn::Linear.
  expect_bound(transformer, "encoder.layers.0.linear1.weight", std::sqrt(6.0 / 48), 0.9);
}

TEST(Adopt, InitializesRecurrentModulesByHiddenSize) {
  const auto model = initialised([] { return torch::nn::GRU(3, 16).ptr(); });
  expect_bound(model, "weight_ih_l0", 0.25, 0.8);
}

TEST(Adopt, PrefersInitializersOfTheProgram) {
  const auto model = adopt<testing::TorchScale>(std::make_shared<testing::TorchScaled>());
  model->set_initializers({{"gain.scale", init::constant(3)}, {"fc.bias", init::ones()}});
  init_weights(*model, 1);
  EXPECT_EQUAL(value(model, "gain.scale"), at::full({3}, 3.0F));
  EXPECT_EQUAL(value(model, "fc.bias"), at::ones({3}));
  EXPECT_LE(value(model, "fc.weight").abs().max().item<double>(), 1 / std::sqrt(5.0));
  model->set_initializers({{"gain.shift", init::zeros()}});
  EXPECT_ERROR(init_weights(*model, 1), "'gain.shift' matches no parameter");
}

TEST(Adopt, NamesUninitializedParametersAndTheRemedy) {
  const auto model = [] {
    const MetaDevice meta;
    return adopt<testing::TorchScale>(std::make_shared<testing::TorchScaled>());
  }();
  to_empty(*model, at::kCPU);
  EXPECT_ERROR(init_weights(*model, 1), "'gain.scale'", "never filled",
               "in a module from nn::adopt, with set_initializers");
}

}  // namespace adopt_test
}  // namespace
}  // namespace tessera::nn
