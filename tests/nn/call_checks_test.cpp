// The outermost call of a module refuses parameters outside of slots, unfilled storage and skipped
// hooks.

#include <torch/nn/modules/linear.h>

#include <type_traits>

#include "tessera/nn/containers.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/nn/hooked.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/linear.h"
#include "testing/distributed.h"

namespace tessera::nn {
namespace {

/// One parameter in a slot, one of libtorch's kind beside it.
class HalfIn : public Module<HalfIn> {
 public:
  HalfIn() : stray(register_parameter("stray", at::ones({2}))) {
    weight = register_slot("weight", at::ones({2}));
  }
  at::Tensor forward(const at::Tensor& x) { return x * *weight + stray; }

  Parameter weight;
  at::Tensor stray;
};

/// An optional parameter that is not there, as libtorch's own modules register a missing bias.
class WithoutBias : public Module<WithoutBias> {
 public:
  WithoutBias() {
    weight = register_slot("weight", at::ones({2}));
    register_parameter("bias", {}, /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) { return x * *weight; }
  Parameter weight;
};

/// Holds a module of libtorch's, built wherever the scope says.
class HoldsStock : public Module<HoldsStock> {
 public:
  HoldsStock() : fc(register_module("fc", torch::nn::Linear(2, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return fc(x); }
  torch::nn::Linear fc;
};

/// Holds a child that libtorch's tree does not know until `known` is called.
class Forgets : public Module<Forgets> {
 public:
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

class WithBuffers : public Module<WithBuffers> {
 public:
  WithBuffers() { table = register_buffer_slot("table", {2}); }
  at::Tensor forward(const at::Tensor& x) { return x + *table; }
  Parameter table;
};

const at::Tensor& input() {
  static const at::Tensor x = at::ones({3, 2});
  return x;
}

TEST(CallChecks, AllowAParameterThatIsUndefined) {
  WithoutBias module;
  EXPECT_EQUAL(module(input()), input());
}

TEST(CallChecks, NoticeWhatWasFilledAndEmptied) {
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

TEST_ON_MESH(CallChecks, KnowWhatWasFilledBeforeItWasDistributed, {2}, {"tp"}) {
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

TEST(CallChecks, RefuseForwardOfAModuleWithHooks) {
  Linear module(2, 2);
  init_weights(module, 0);
  EXPECT_NO_THROW(module.forward(input()));
  int calls = 0;
  module.add_forward_pre_hook([&](ModuleBase&, TensorList) { ++calls; });
  EXPECT_ERROR(module.forward(input()), "m.forward(x)", "has hooks", "(*m)(x)");
  module(input());
  EXPECT_EQ(calls, 1);
  // Also after a call that failed.
  EXPECT_THROWN(std::exception, module(at::ones({3, 3})), "shapes cannot be multiplied");
  EXPECT_ERROR(module.forward(input()), "has hooks");
}

TEST(CallChecks, Refusals) {
  HalfIn module;
  EXPECT_ERROR(module(input()), "parameter 'stray'", "no optimizer, no saving", "register_slot");
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
    const auto module = [] {
      const MetaDevice meta;
      return std::make_shared<Linear>(2, 2);
    }();
    EXPECT_ERROR((*module)(input()), "'weight', 'bias'", "on the meta device", "nn::to_empty");
    to_empty(*module, at::kCPU);
    EXPECT_ERROR((*module)(input()), "was never filled", "nn::init_weights");
    init_weights(*module, 0);
    EXPECT_NO_THROW((*module)(input()));
  }
  {
    const auto module = [] {
      const MetaDevice meta;
      return std::make_shared<Hooked<torch::nn::Linear>>(2, 2);
    }();
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
    EXPECT_ERROR(module.forward(input()), "has hooks");
    EXPECT_NO_THROW(module(input()));
  }
  {
    Forgets module(std::make_shared<Linear>(2, 2));
    EXPECT_ERROR(module(at::ones({1, 2})), "was called in the forward of a ",
                 "but no module has it registered", "give it to register_module",
                 "nn::init_weights");
  }
}

TEST(CallChecks, AModuleMayBeRegisteredInTheForwardThatCallsIt) {
  const auto child = std::make_shared<Linear>(2, 2);
  child->weight.slot()->set(at::eye(2));
  child->bias.slot()->set(at::zeros({2}));
  Forgets module(child);
  module.known = true;
  EXPECT_EQUAL(module(at::ones({1, 2})), at::ones({1, 2}));
  EXPECT_EQ(child->fqn(), "fc");
}

TEST(CallChecks, AFrozenModuleMayBeApart) {
  const auto teacher = std::make_shared<Sequential>(std::make_shared<Linear>(2, 2));
  class Teaches : public Module<Teaches> {
   public:
    at::Tensor forward(const at::Tensor& x) { return (*teacher)(x); }
    std::shared_ptr<Sequential> teacher;
  };
  Teaches module;
  module.teacher = teacher;
  for (const at::Tensor& parameter : teacher->parameters()) {
    parameter.detach().fill_(2);
  }
  EXPECT_ERROR(module(at::ones({1, 2})), "no module has it registered", "nn::freeze");
  for (at::Tensor& parameter : teacher->parameters()) {
    parameter.requires_grad_(false);
  }
  EXPECT_EQUAL(module(at::ones({1, 2})), at::full({1, 2}, 6.0));
}

TEST(CallChecks, AFrozenModuleThatIsApartMustBeFilled) {
  const auto child = std::make_shared<Linear>(2, 2);
  for (at::Tensor& parameter : child->parameters()) {
    parameter.requires_grad_(false);
  }
  Forgets module(child);
  EXPECT_ERROR(module(at::ones({1, 2})), "forward of a", "was never filled", "'weight'");
}

/// A weight of libtorch's kind, bound to a slot.
struct Bound : Module<Bound> {
  Bound() : weight(at::ones({2, 2})) { bind_slot("weight", weight); }
  at::Tensor forward(const at::Tensor& x) { return at::mm(x, weight); }
  at::Tensor weight;
};

/// Two of them, of which one is assigned the weight of the other.
std::shared_ptr<Sequential> tied_by_assignment() {
  const auto first = std::make_shared<Bound>(), second = std::make_shared<Bound>();
  auto both = std::make_shared<Sequential>(first, second);
  second->weight = first->weight;
  return both;
}

/// libtorch's way to tie.
struct TorchTied : torch::nn::Module {
  TorchTied()
      : embed(register_module("embed", torch::nn::Linear(2, 2))),
        head(register_module("head", torch::nn::Linear(2, 2))) {
    head->weight = embed->weight;
  }
  at::Tensor forward(const at::Tensor& x) { return head(embed(x)); }
  torch::nn::Linear embed, head;
};

/// Keeps tensors of the constructor, where they have no storage under MetaDevice.
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

TEST(CallChecks, LeadToTieSlotWhereAMemberIsAssigned) {
  const auto late = std::make_shared<Bound>();
  (*late)(input());
  late->weight = at::ones({2, 2});
  testing::expect_refusals({
      {"call",
       [] { (*tied_by_assignment())(input()); },
       {"'1.weight'", "Bound", "tie_slot(\"weight\""}},
      {"walk", [] { tied_by_assignment()->named_slots(); }, {"'1.weight'", "tie_slot"}},
      {"init", [] { init_weights(*tied_by_assignment(), 0); }, {"'1.weight'", "tie_slot"}},
      {"after a call", [&] { (*late)(input()); }, {"'weight'", "tie_slot", "copy_"}},
      {"adopt",
       [] { adopt(std::make_shared<TorchTied>()); },
       {"'head.weight'", "tie_slot(\"weight\""}},
  });
  static_assert(!std::is_copy_assignable_v<Parameter>);
  const auto tied =
      std::make_shared<Sequential>(std::make_shared<Bound>(), std::make_shared<Bound>());
  const auto slots = tied->named_slots();
  dynamic_cast<Bound&>(*tied->children()[1]).tie_slot("weight", slots[0].second);
  EXPECT_EQUAL((*tied)(input()), at::full({3, 2}, 4.0));
}

TEST(CallChecks, NameTheConstructorWhereATensorWasKeptOnMeta) {
  for (const bool reads_scale : {false, true}) {
    const auto module = [] {
      const MetaDevice meta;
      return std::make_shared<KeepsTensors>();
    }();
    module->reads_scale = reads_scale;
    to_empty(*module, at::kCPU);
    init_weights(*module, 0);
    const std::string error = testing::message_of([&] { (*module)(input()); });
    EXPECT_CONTAINS(error, "KeepsTensors", "meta", "constructor");
  }
}

TEST(CallChecks, AModuleMayBeKeptApartOnPurpose) {
  const auto teacher = std::make_shared<Linear>(2, 2);
  init_weights(*teacher, 0);
  Forgets module(teacher);
  EXPECT_NO_THROW(module(at::ones({1, 2})));
}

}  // namespace
}  // namespace tessera::nn
