// Tests initial values, and the errors that a module's call throws if a parameter has no
// ParameterSlot or no values, or if a direct call of forward() skips hooks.

#include <torch/nn/modules/linear.h>

#include <type_traits>

#include "tessera/nn/hooked.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "testing/distributed.h"
#include "testing/models.h"
#include "testing/module_values.h"

namespace tessera::nn {
namespace {

using testing::LayersOfEachKind;
using testing::parameter_values;

std::shared_ptr<LayersOfEachKind> meta_model() {
  return testing::made_on_meta<LayersOfEachKind>();
}

TEST(MetaDevice, AppliesToParametersAndFactories) {
  const auto model = meta_model();
  for (const auto& [name, slot] : model->named_slots()) {
    EXPECT_TRUE(slot->get().is_meta()) << name;
  }
  {
    const MetaDevice meta;
    EXPECT_TRUE(at::zeros({3}).is_meta());
  }
  EXPECT_TRUE(at::zeros({3}).is_cpu());
}

TEST(ToEmpty, GivesStorageToEverySlot) {
  const auto model = meta_model();
  to_empty(*model, c10::kCPU);
  for (const auto& [name, slot] : model->named_slots()) {
    EXPECT_TRUE(slot->get().is_cpu()) << name;
    EXPECT_TRUE(slot->get().requires_grad()) << name;
  }
  for (const auto& [name, slot] : model->named_buffer_slots()) {
    EXPECT_TRUE(slot->get().is_cpu());
  }
}

TEST(ToEmpty, KeepsTensorsWithStorage) {
  Linear module(2, 2);
  const at::Tensor before = module.weight;
  to_empty(module, c10::kCPU);
  EXPECT_TRUE((*module.weight).is_same(before));
}

TEST(ToEmpty, RefusesMetaBuffersOfLibtorch) {
  const auto model = meta_model();
  {
    const MetaDevice meta;
    model->register_buffer("stray", at::ones({2}));
  }
  EXPECT_ERROR(to_empty(*model, c10::kCPU), "'stray'");
}

TEST(InitWeights, RequiresStorage) {
  const auto model = meta_model();
  EXPECT_ERROR(init_weights(*model, 1), "to_empty");
}

TEST(InitWeights, NamesUninitializedParametersAndTheRemedy) {
  struct Forgets : Module<Forgets> {
    Forgets() { scale = register_slot("scale", {3}); }
    Parameter scale;
  };
  Forgets module;
  for (const auto init : {&init_weights, &init_unfilled}) {
    const std::string message = testing::message_of([&] { init(module, 1); });
    EXPECT_CONTAINS(message, "'scale'", "fill them in reset_parameters of their class");
    EXPECT_FALSE(testing::Contains(message, {"nn::init_weights"}));
  }
  EXPECT_ERROR(check_initialized(module), "call nn::init_weights");
}

TEST(InitWeights, UsesDefaultsTheParentAndATable) {
  const auto model = meta_model();
  to_empty(*model, c10::kCPU);
  EXPECT_ERROR(check_initialized(*model), "parameters or buffers was never filled");
  init_weights(*model, 1);
  check_initialized(*model);
  EXPECT_EQUAL(model->norm->weight, at::ones({6}));
  EXPECT_EQUAL(model->table, at::arange(4, at::kFloat));
  EXPECT_EQUAL(model->out->weight, at::full({5, 6}, 0.25));
  for (const auto& layer : model->layers->items()) {
    EXPECT_EQUAL(layer->slot("bias")->get(), at::full({6}, 3.0));
    EXPECT_FALSE(layer->slot("weight")->get().equal(at::full({6, 6}, 3.0)));
  }
}

TEST(InitWeights, DependsOnlyOnTheSeed) {
  const auto a = meta_model();
  const auto b = meta_model();
  const auto c = meta_model();
  for (const auto& model : {a, b, c}) {
    to_empty(*model, c10::kCPU);
  }
  init_weights(*a, 1);
  at::rand({17});
  init_weights(*b, 1);
  init_weights(*c, 2);
  EXPECT_EQUAL(parameter_values(*a), parameter_values(*b));
  EXPECT_FALSE(parameter_values(*a).equal(parameter_values(*c)));
}

TEST(InitWeights, FillsATiedParameterOnce) {
  auto a = std::make_shared<Linear>(3, 3, LinearOptions{.bias = false});
  auto b = std::make_shared<Linear>(3, 3, LinearOptions{.bias = false});
  Sequential tied(a, b);
  b->tie_slot("weight", a->slot("weight"));
  init_weights(tied, 5);
  const at::Tensor expected = at::empty({3, 3});
  const double bound = 1.0 / std::sqrt(3.0);
  uniform_(expected, -bound, bound, {5, stream_of("0.weight")});
  EXPECT_EQUAL(a->weight->detach(), expected);
}

TEST(InitBuffers, KeepsParameters) {
  const auto model = meta_model();
  to_empty(*model, c10::kCPU);
  init_weights(*model, 1);
  model->out->weight->detach().fill_(9.0);
  model->table->fill_(7.0);
  init_buffers(*model);
  EXPECT_EQUAL(model->out->weight->detach(), at::full({5, 6}, 9.0));
  EXPECT_TRUE(model->table->equal(at::arange(4, at::kFloat)));
}

TEST(InitBuffers, KeepsLoadedPersistentBuffers) {
  struct Counts : Module<Counts> {
    Counts() { counts = register_buffer_slot("counts", {3}); }
    void reset_parameters(const InitContext& init) override {
      init.set_buffer(counts, at::zeros({3}));
    }
    Parameter counts;
  };
  Counts module;
  init_buffers(module);
  EXPECT_TRUE(module.counts->equal(at::zeros({3})));
  module.counts->fill_(7.0);
  init_buffers(module);
  EXPECT_TRUE(module.counts->equal(at::full({3}, 7.0)));
}

TEST(InitBuffers, KeepsTheKeyAndCallsOfDropout) {
  Dropout dropout(0.5);
  init_buffers(dropout, 3);
  EXPECT_EQ(dropout.key()->seed, 3U);
  init_weights(dropout, 5);
  dropout.set_calls(7);
  init_buffers(dropout);
  EXPECT_EQ(dropout.key()->seed, 5U);
  EXPECT_EQ(dropout.calls(), 7U);
}

TEST(CheckInitialized, AcceptsMarkedSlots) {
  Linear module(2, 2);
  EXPECT_ERROR(check_initialized(module),
               "the storage of 2 parameters or buffers was never filled");
  for (const auto& [name, slot] : module.named_slots()) {
    slot->set_initialized(true);
  }
  check_initialized(module);
}

void expect_as_on_one_rank(const std::vector<std::int64_t>& sizes, const Placements& placements) {
  const auto single = meta_model();
  to_empty(*single, c10::kCPU);
  init_weights(*single, 11);
  const at::Tensor expected = parameter_values(*single);
  std::vector<std::string> names{"dp", "tp"};
  names.resize(sizes.size());
  RunOnMesh(sizes, names, [&](const DeviceMesh& mesh) {
    const auto model = meta_model();
    for (const auto& [name, slot] : model->named_slots()) {
      slot->set(
          distribute_tensor(slot->get().detach(), mesh, placements).tensor().requires_grad_());
    }
    to_empty(*model, c10::kCPU);
    init_weights(*model, 11);
    EXPECT_EQUAL(parameter_values(*model), expected);
  });
}

TEST(InitWeights, GivesEqualWeightsOnAnyMesh) {
  expect_as_on_one_rank({4}, {Shard{0}});
  expect_as_on_one_rank({3}, {Shard{0}});
  expect_as_on_one_rank({2}, {Replicate{}});
  expect_as_on_one_rank({2, 2}, {Shard{0}, Shard{0}});
  expect_as_on_one_rank({2, 3}, {Shard{0}, Replicate{}});
}

/// `weight` is a slot. `stray` is registered by libtorch's register_parameter(), without a slot.
struct HalfIn : Module<HalfIn> {
  HalfIn() : stray(register_parameter("stray", at::ones({2}))) {
    weight = register_slot("weight", at::ones({2}));
  }
  at::Tensor forward(const at::Tensor& x) { return x * *weight + stray; }

  Parameter weight;
  at::Tensor stray;
};

/// `bias` stays undefined, like the bias of a libtorch module without bias.
struct WithoutBias : Module<WithoutBias> {
  WithoutBias() {
    weight = register_slot("weight", at::ones({2}));
    register_parameter("bias", {}, /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) { return x * *weight; }
  Parameter weight;
};

/// Under MetaDevice, the parameters of the libtorch child `fc` have no storage.
struct HoldsStock : Module<HoldsStock> {
  HoldsStock() : fc(register_module("fc", torch::nn::Linear(2, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return fc(x); }
  torch::nn::Linear fc;
};

struct Forgets : Module<Forgets> {
  explicit Forgets(std::shared_ptr<Linear> child) : fc(std::move(child)) {}
  at::Tensor forward(const at::Tensor& x) {
    if (known) {
      register_module("fc", fc);
      known = false;
    }
    return (*fc)(x);
  }
  std::shared_ptr<Linear> fc;
  bool known = false;
};

struct WithBuffers : Module<WithBuffers> {
  WithBuffers() { table = register_buffer_slot("table", {2}); }
  at::Tensor forward(const at::Tensor& x) { return x + *table; }
  Parameter table;
};

const at::Tensor& input() {
  static const at::Tensor x = at::ones({3, 2});
  return x;
}

TEST(CallChecks, AllowUndefinedParameters) {
  WithoutBias module;
  EXPECT_EQUAL(module(input()), input());
}

TEST(CallChecks, DetectUninitializedParameters) {
  Linear module(2, 2);
  module.weight->detach().zero_();
  EXPECT_ERROR(module(input()), "never filled ('bias')");
  module.bias->detach().fill_(1);
  EXPECT_EQUAL(module(input()), at::ones({3, 2}));
  module.slot("bias")->set_initialized(false);
  EXPECT_ERROR(module(input()), "'bias'");
  Linear other(2, 2, {.bias = false});
  other.slot("weight")->set(at::eye(2).requires_grad_());
  EXPECT_EQUAL(other(input()), input());
}

TEST_ON_MESH(CallChecks, DetectUninitializedDistributedParameters, {2}, {"tp"}) {
  Linear filled(4, 2, {.bias = false});
  filled.weight->detach().zero_();
  Linear empty(4, 2, {.bias = false});
  for (Linear* module : {&filled, &empty}) {
    distribute_parameter(*module->slot("weight"), mesh, {Shard{1}});
  }
  EXPECT_TRUE(filled.slot("weight")->initialized());
  EXPECT_FALSE(empty.slot("weight")->initialized());
  local_tensor(empty.weight).zero_();
  EXPECT_TRUE(empty.slot("weight")->initialized());
}

TEST(CallChecks, RefuseDirectForwardOfAModuleWithHooks) {
  Linear module(2, 2);
  init_weights(module, 0);
  EXPECT_NO_THROW(module.forward(input()));
  int calls = 0;
  module.add_forward_pre_hook([&](ModuleBase&, TensorList) { ++calls; });
  EXPECT_ERROR(module.forward(input()), "m.forward(x)", "hooks", "(*m)(x)");
  module(input());
  EXPECT_EQ(calls, 1);
  // A failed call must not allow later direct calls of forward().
  EXPECT_THROWN(std::exception, module(at::ones({3, 3})), "shapes cannot be multiplied");
  EXPECT_ERROR(module.forward(input()), "skips the module's hooks");
}

TEST(CallChecks, RefuseUnregisteredAndUninitializedParameters) {
  HalfIn module;
  EXPECT_ERROR(module(input()), "parameter 'stray'", "optimizers, checkpoints", "register_slot");
  EXPECT_ERROR(init_weights(module, 0), "parameter 'stray'");
  Sequential outer(std::make_shared<HalfIn>());
  EXPECT_ERROR(outer(input()), "parameter '0.stray'");
  EXPECT_ERROR(outer.named_slots(), "parameter '0.stray'");
  Linear linear(2, 2);
  init_weights(linear, 0);
  linear(input());
  linear.register_parameter("stray", at::ones({2}));
  EXPECT_ERROR(linear(input()), "parameter 'stray'", "register_slot");
  {
    HoldsStock module;
    EXPECT_ERROR(module(input()), "parameter 'fc.weight'", "nn::Hooked");
    const MetaDevice meta;
    HoldsStock on_meta;
    EXPECT_ERROR(on_meta(input()), "parameter 'fc.weight'", "nn::Hooked");
  }
  {
    Sequential module(std::make_shared<Linear>(2, 2));
    EXPECT_ERROR(module(input()), "forward of a tessera::nn::Sequential", "'0.weight', '0.bias'",
                 "nn::init_weights");
    init_weights(module, 0);
    EXPECT_NO_THROW(module(input()));
  }
  {
    const auto module = testing::made_on_meta<Linear>(2, 2);
    EXPECT_ERROR((*module)(input()), "'weight', 'bias'", "on the meta device", "nn::to_empty");
    to_empty(*module, at::kCPU);
    EXPECT_ERROR((*module)(input()), "was never filled", "nn::init_weights");
    init_weights(*module, 0);
    EXPECT_NO_THROW((*module)(input()));
  }
  {
    const auto module = testing::made_on_meta<Hooked<torch::nn::Linear>>(2, 2);
    EXPECT_ERROR((*module)(input()), "'weight', 'bias'", "nn::to_empty");
    to_empty(*module, at::kCPU);
    EXPECT_ERROR((*module)(input()), "was never filled");
  }
  {
    WithBuffers module;
    EXPECT_ERROR(module(input()), "'table'");
    module.table->zero_();
    EXPECT_EQUAL(module(input()), input());
  }
  {
    WithBuffers module;
    module.table->zero_();
    module.register_buffer("ids", at::empty({2}, at::device(at::kMeta)));
    EXPECT_ERROR(module(input()), "buffer 'ids'", "on the meta device");
  }
  {
    Hooked<torch::nn::Linear> module(2, 2);
    EXPECT_NO_THROW(module.forward(input()));
    module.add_forward_hook([](ModuleBase&, TensorList) {});
    EXPECT_ERROR(module.forward(input()), "skips the module's hooks");
    EXPECT_NO_THROW(module(input()));
  }
  {
    Forgets module(std::make_shared<Linear>(2, 2));
    EXPECT_ERROR(module(at::ones({1, 2})), "was called in the forward of a ",
                 "but is not registered", "register_module", "nn::init_weights");
  }
}

TEST(CallChecks, AllowRegistrationDuringForward) {
  const auto child = std::make_shared<Linear>(2, 2);
  child->weight.slot()->set(at::eye(2));
  child->bias.slot()->set(at::zeros({2}));
  Forgets module(child);
  module.known = true;
  EXPECT_EQUAL(module(at::ones({1, 2})), at::ones({1, 2}));
  EXPECT_EQ(child->fqn(), "fc");
}

TEST(CallChecks, AllowUnregisteredFrozenModules) {
  const auto teacher = std::make_shared<Sequential>(std::make_shared<Linear>(2, 2));
  struct Teaches : Module<Teaches> {
    at::Tensor forward(const at::Tensor& x) { return (*teacher)(x); }
    std::shared_ptr<Sequential> teacher;
  };
  Teaches module;
  module.teacher = teacher;
  for (const at::Tensor& parameter : teacher->parameters()) {
    parameter.detach().fill_(2);
  }
  EXPECT_ERROR(module(at::ones({1, 2})), "is not registered", "nn::freeze");
  for (at::Tensor& parameter : teacher->parameters()) {
    parameter.requires_grad_(false);
  }
  EXPECT_EQUAL(module(at::ones({1, 2})), at::full({1, 2}, 6.0));
}

TEST(CallChecks, RefuseUninitializedUnregisteredModules) {
  const auto child = std::make_shared<Linear>(2, 2);
  for (at::Tensor& parameter : child->parameters()) {
    parameter.requires_grad_(false);
  }
  Forgets module(child);
  EXPECT_ERROR(module(at::ones({1, 2})), "forward of a", "was never filled", "'weight'");
}

/// `head` and `embed` have the same weight tensor, which is how libtorch ties weights.
struct TorchTied : torch::nn::Module {
  TorchTied()
      : embed(register_module("embed", torch::nn::Linear(2, 2))),
        head(register_module("head", torch::nn::Linear(2, 2))) {
    head->weight = embed->weight;
  }
  at::Tensor forward(const at::Tensor& x) { return head(embed(x)); }
  torch::nn::Linear embed, head;
};

/// The constructor stores `kept` and `scale`. Under MetaDevice, these tensors have no storage.
struct KeepsTensors : Module<KeepsTensors> {
  KeepsTensors() {
    weight = register_slot("weight", {2, 2});
    kept = *weight;
    scale = at::ones({2});
  }
  at::Tensor forward(const at::Tensor& x) { return reads_scale ? x * scale : at::mm(x, kept); }
  void reset_parameters(const InitContext& init) override { init.fill(weight, init::ones()); }
  Parameter weight;
  at::Tensor kept, scale;
  bool reads_scale = false;
};

TEST(CallChecks, SuggestTieSlotForAnAssignedMember) {
  EXPECT_ERROR(adopt(std::make_shared<TorchTied>()), "'head.weight'", "tie_slot(\"weight\"");
  static_assert(!std::is_copy_assignable_v<Parameter>);
}

TEST(CallChecks, NameTheConstructorThatKeptAMetaTensor) {
  for (const bool reads_scale : {false, true}) {
    const auto module = testing::made_on_meta<KeepsTensors>();
    module->reads_scale = reads_scale;
    to_empty(*module, at::kCPU);
    init_weights(*module, 0);
    const std::string error = testing::message_of([&] { (*module)(input()); });
    EXPECT_CONTAINS(error, "KeepsTensors", "meta", "constructor");
  }
}

TEST(CallChecks, AllowASeparatelyInitializedModule) {
  const auto teacher = std::make_shared<Linear>(2, 2);
  init_weights(*teacher, 0);
  Forgets module(teacher);
  EXPECT_NO_THROW(module(at::ones({1, 2})));
}

}  // namespace
}  // namespace tessera::nn
