// Tests modules: slots, names, hooks, traversals of modules and tensors, patterns of names, and the
// modules of tessera::nn that have parameters.

#include <chrono>
#include <stdexcept>

#include "nn/graphs.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/visit_tensors.h"
#include "testing/models.h"
#include "testing/module_values.h"

namespace tessera::nn {
namespace {

struct Doubler : Module<Doubler> {
  std::pair<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x, int times,
                                                         std::optional<at::Tensor> y) {
    if (times < 0) {
      throw std::runtime_error("negative");
    }
    at::Tensor sum = x * times;
    if (y) {
      sum = sum + *y;
    }
    return {sum, {x, sum}};
  }
};

struct Silent : Module<Silent> {
  void forward(const at::Tensor& x) { seen = x; }
  at::Tensor seen;
};

struct Affine : Module<Affine> {
  Affine() {
    weight = register_slot("weight", at::full({3}, 2.0));
    bias = register_slot("bias", at::ones({3}));
  }
  at::Tensor forward(const at::Tensor& x) { return x * *weight + *bias; }
  Parameter weight, bias;
};

struct Parent : Module<Parent> {
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  Child<Affine> first{*this, "first"}, second{*this, "second"};
};

TEST(Child, IsRegisteredAtItsDeclarationAndCalledWithHooks) {
  Parent parent;
  EXPECT_EQ(
      testing::names_of(parent.named_slots()),
      (std::vector<std::string>{"first.weight", "first.bias", "second.weight", "second.bias"}));
  int calls = 0;
  parent.second->add_forward_hook([&](ModuleBase&, TensorList) { ++calls; });
  EXPECT_EQUAL(parent(at::ones({3})), at::full({3}, 7.0));
  EXPECT_EQ(calls, 1);
  EXPECT_EQUAL(*(*parent.first).weight, at::full({3}, 2.0));
}

TEST(Module, RunsHooksInOrderAroundForward) {
  Doubler module;
  std::string log;
  module.add_forward_pre_hook([&](ModuleBase&, TensorList) { log += "a"; });
  module.add_forward_pre_hook([&](ModuleBase&, TensorList) { log += "b"; });
  module.add_forward_hook([&](ModuleBase&, TensorList) { log += "c"; });
  module.add_always_hook([&] { log += "d"; });
  module(at::ones({1}), 1, std::nullopt);
  EXPECT_EQ(log, "abcd");
}

TEST(Module, LetsHooksReplaceArgumentsAndResults) {
  Doubler module;
  module.add_forward_pre_hook([](ModuleBase&, TensorList tensors) {
    for (at::Tensor* tensor : tensors) {
      *tensor = *tensor + 1;
    }
  });
  module.add_forward_hook([](ModuleBase&, TensorList tensors) { *tensors[0] = -*tensors[0]; });
  const at::Tensor x = at::ones({1});
  const auto [sum, parts] = module(x, 3, std::optional(x));
  EXPECT_EQ(sum.item<double>(), -8.0);
  EXPECT_EQ(parts[0].item<double>(), 2.0);
  EXPECT_EQ(x.item<double>(), 1.0);
}

TEST(Module, RunsAlwaysHooksWhenForwardOrAHookThrows) {
  Doubler module;
  int runs = 0;
  module.add_always_hook([&] { ++runs; });
  EXPECT_THROWN(std::runtime_error, module(at::ones({1}), -1, std::nullopt), "negative");
  EXPECT_EQ(runs, 1);
  module.add_forward_pre_hook([](ModuleBase&, TensorList) { throw Error("the hook failed"); });
  EXPECT_ERROR(module(at::ones({1}), 1, std::nullopt), "the hook failed");
  EXPECT_EQ(runs, 2);
}

TEST(Module, RunsPostHooksWithoutTensorsForVoid) {
  Silent module;
  std::size_t count = 99;
  module.add_forward_hook([&](ModuleBase&, TensorList tensors) { count = tensors.size(); });
  module(at::ones({2}));
  EXPECT_EQ(count, 0U);
  EXPECT_TRUE(module.seen.defined());
}

TEST(Module, AllowsAHookToAddAHook) {
  Silent module;
  int runs = 0;
  module.add_forward_pre_hook([&](ModuleBase& m, TensorList) {
    if (runs++ == 0) {
      m.add_forward_pre_hook([&](ModuleBase&, TensorList) { runs += 10; });
    }
  });
  module(at::ones({2}));
  EXPECT_EQ(runs, 11);
}

struct Buffered : Module<Buffered> {
  Buffered() {
    weight = register_slot("weight", at::ones({2}));
    table = register_buffer_slot("table", {2});
    ids = register_buffer_slot("ids", {2});
    ids.slot()->set(at::arange(2));
  }
  Parameter weight, table, ids;
};

TEST(Module, ConvertsParametersAndFloatingPointBuffers) {
  Buffered module;
  module.to(at::kBFloat16);
  EXPECT_EQ(module.weight->scalar_type(), at::kBFloat16);
  EXPECT_EQ(module.table->scalar_type(), at::kBFloat16);
  EXPECT_EQ(module.ids->scalar_type(), at::kLong);
  EXPECT_TRUE(module.weight->is_leaf() && module.weight->requires_grad());
}

TEST(Slot, NewTensorIsVisibleUnderEveryName) {
  Affine module;
  const at::Tensor weight = at::full({3}, 5.0).requires_grad_();
  const at::Tensor bias = at::full({3}, 7.0).requires_grad_();
  module.slot("weight")->set(weight);
  module.slot("bias")->set(bias);
  EXPECT_TRUE((*module.weight).is_same(weight) && (*module.bias).is_same(bias));
  auto names = module.named_parameters();
  EXPECT_TRUE(names["weight"].is_same(weight) && names["bias"].is_same(bias));
  EXPECT_EQ(module(at::ones({3}))[0].item<double>(), 12.0);
}

TEST(Slot, IsSharedByTiedParameters) {
  auto a = std::make_shared<Linear>(4, 4, LinearOptions{.bias = false});
  auto b = std::make_shared<Linear>(4, 4, LinearOptions{.bias = false});
  Sequential both(a, b);
  b->tie_slot("weight", a->slot("weight"));
  EXPECT_EQ(both.named_slots().size(), 1U);
  const at::Tensor swapped = at::ones({4, 4}).requires_grad_();
  a->slot("weight")->set(swapped);
  EXPECT_TRUE((*b->weight).is_same(swapped));
  EXPECT_TRUE(b->named_parameters()["weight"].is_same(swapped));
  EXPECT_EQ(a->slot("weight")->owners().size(), 2U);
}

TEST(Slot, OutlivesItsModule) {
  SlotPtr slot;
  {
    Linear module(2, 2);
    slot = module.slot("weight");
  }
  EXPECT_TRUE(slot->owners().empty());
  slot->set(at::ones({2, 2}));
  EXPECT_EQUAL(slot->get(), at::ones({2, 2}));
}

TEST(Slot, KeepsThePersistentTensorWhileGathered) {
  Linear module(2, 2, {.bias = false});
  const SlotPtr slot = module.slot("weight");
  const at::Tensor sharded = at::zeros({1, 2});
  slot->set_persistent(sharded);
  slot->set(at::ones({2, 2}));
  EXPECT_TRUE(slot->persistent().is_same(sharded));
  EXPECT_EQUAL(slot->get(), at::ones({2, 2}));
}

/// libtorch's register_parameter() makes no slot, so FSDP and optimizers would not find `w`.
struct Stock : torch::nn::Module {
  Stock() { register_parameter("w", at::ones({2})); }
};

TEST(Slot, RefusesInvalidCalls) {
  Linear a(4, 4);
  Linear b(5, 4);
  EXPECT_ERROR(b.tie_slot("weight", a.slot("weight")), "can't be tied to a parameter of sizes");
  Linear module(2, 2);
  EXPECT_ERROR(module.slot("wight"), "weight, bias");
  Sequential root;
  root.register_module("stock", std::make_shared<Stock>());
  EXPECT_ERROR(root.named_slots(), "'stock.w'");
}

TEST(Module, TrainsParametersOfEveryDifferentiableDtype) {
  struct Complex : Module<Complex> {
    Complex() {
      filter = register_slot("filter", at::ones({3}, at::kComplexFloat));
      wide = register_slot("wide", at::ones({3}, at::kComplexDouble));
      steps = register_slot("steps", at::ones({3}, at::kLong));
    }
    at::Tensor forward(const at::Tensor& x) {
      return at::view_as_real(x * *filter * *wide * *steps).square().mean();
    }
    Parameter filter, wide, steps;
  };
  Complex module;
  EXPECT_FALSE(module.slot("steps")->get().requires_grad());
  module(at::full({3}, 2.0)).backward();
  EXPECT_CLOSE(module.filter->grad(), at::full({3}, 8.0 / 6, at::kComplexFloat));
  EXPECT_CLOSE(module.wide->grad(), at::full({3}, 8.0 / 6, at::kComplexDouble));
}

template <class Inner>
struct Calling : Module<Calling<Inner>> {
  at::Tensor forward(const at::Tensor& x) { return inner(x); }
  Child<Inner> inner{*this, "inner"};
};

TEST(Module, IsNamedInAnErrorOfLibtorch) {
  struct Squaring : Module<Squaring> {
    at::Tensor forward(const at::Tensor& x) { return x.mm(x); }
  };
  Calling<Calling<Squaring>> root;
  EXPECT_THROWN(c10::Error, root(at::ones({2, 3})), "mat1 and mat2 shapes",
                "(in module 'inner.inner', a ");
}

TEST(Module, IsNamedInAnErrorOfTheLibrary) {
  struct Special : Error {
    using Error::Error;
  };
  struct Checking : Module<Checking> {
    at::Tensor forward(const at::Tensor& x) {
      if (x.dim() == 1) {
        throw Special("of its own class");
      }
      TESSERA_CHECK(x.dim() == 3, "three dimensions were asked for; pass them");
      return x;
    }
  };
  Calling<Checking> module;
  const std::string message = testing::message_of([&] { module(at::ones({2, 3})); });
  EXPECT_CONTAINS(message, "pass them (in module 'inner', a ", "Checking)");
  EXPECT_EQ(message.find("in module"), message.rfind("in module"));
  EXPECT_THROWN(Special, module(at::ones({2})), "of its own class");
}

/// The parameter is bf16 and the buffer is fp32, as in an FSDP unit that gathers its parameters in
/// bf16.
struct Scaled : Module<Scaled> {
  struct Product : Module<Product> {
    at::Tensor forward(const at::Tensor& x, const at::Tensor& weight) { return x.mm(weight); }
  };
  explicit Scaled(bool of_libtorch) {
    weight = register_slot("weight", at::ones({3, 3}, at::kBFloat16));
    if (of_libtorch) {
      table = register_buffer("table", at::ones({3}));
    } else {
      slot_table = register_buffer_slot("table", {3});
      slot_table->fill_(1);
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    return product(x * (table.defined() ? table : *slot_table), *weight);
  }
  Child<Product> product{*this, "product"};
  Parameter weight, slot_table;
  at::Tensor table;
};

TEST(Module, NamesABufferOfAnotherDtypeInErrors) {
  for (const bool of_libtorch : {true, false}) {
    struct Root : Module<Root> {
      explicit Root(bool of_libtorch) : scaled(*this, "scaled", of_libtorch) {}
      at::Tensor forward(const at::Tensor& x) { return scaled(x); }
      Child<Scaled> scaled;
    };
    Root root(of_libtorch);
    EXPECT_THROWN(c10::Error, root(at::ones({2, 3}, at::kBFloat16)), "in module 'scaled.product'",
                  "; buffer 'scaled.table' is of type Float, and parameters are BFloat16",
                  "cast the buffer in forward, buffer.to(x.scalar_type())",
                  "a separate FSDP unit whose mp_policy has param_dtype = at::kFloat");
    EXPECT_FALSE(testing::Contains(
        testing::message_of([&] { root(at::ones({2, 4}, at::kBFloat16)); }), {"; buffer"}));
  }
}

TEST(Linear, InitializesWithinTheBoundAndDefersTheBias) {
  Linear module(100, 50);
  init_weights(module, 1);
  EXPECT_LE(module.weight->abs().max().item<double>(), 0.1);
  EXPECT_NEAR(module.weight->std().item<double>(), 0.1 / std::sqrt(3.0), 2e-3);
  module.set_defer_bias(true);
  const at::Tensor x = at::randn({2, 100});
  EXPECT_CLOSE(module(x), at::linear(x, *module.weight));
  Linear without(5, 3, {.bias = false});
  EXPECT_EQ(without.named_slots().size(), 1U);
  EXPECT_FALSE(without.bias.defined());
}

TEST(Embedding, IsInitializedStandardNormal) {
  Embedding module(200, 50);
  init_weights(module, 1);
  EXPECT_NEAR(module.weight->mean().item<double>(), 0.0, 0.04);
  EXPECT_NEAR(module.weight->std().item<double>(), 1.0, 0.03);
}

TEST(Norms, AgreeWithLibtorch) {
  LayerNorm layer_norm(6);
  RMSNorm rms_norm(6, 1e-3);
  init_weights(layer_norm, 1);
  init_weights(rms_norm, 1);
  const at::Tensor x = at::randn({3, 6});
  EXPECT_CLOSE(layer_norm(x), at::layer_norm(x, {6}), 1e-5, 1e-6);
  EXPECT_CLOSE(rms_norm(x), at::rms_norm(x, {6}, {}, 1e-3), 1e-5, 1e-6);
}

TEST(Dropout, DrawsANewMaskAndRepeatsAGivenCall) {
  Dropout module(0.5);
  const at::Tensor x = at::ones({1000});
  EXPECT_FALSE(module(x).equal(module(x)));
  module(x);
  const std::uint64_t calls = module.calls();
  const at::Tensor first = module(x);
  module.set_calls(calls);
  EXPECT_EQUAL(module(x), first);
}

struct DropBlock : Module<DropBlock> {
  at::Tensor forward(const at::Tensor& x) { return (*drop)(x); }
  Child<Dropout> drop{*this, "drop", 0.5};
};

TEST(Dropout, DependsOnItsNameInTheWholeModel) {
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

TEST(Dropout, RefusesInvalidUse) {
  struct Makes : Module<Makes> {
    at::Tensor forward(const at::Tensor& x) { return Dropout(0.5)(x); }
  };
  Makes module;
  EXPECT_ERROR(module(at::ones({4})), "is not registered", "register_module");
  EXPECT_ERROR(Dropout(1.0), "probability 1 is invalid");
}

TEST(Sequential, RunsItsModulesInOrder) {
  auto a = std::make_shared<Linear>(3, 4);
  auto b = std::make_shared<Linear>(4, 2);
  Sequential both(a, b);
  init_weights(both, 1);
  const at::Tensor x = at::randn({5, 3});
  EXPECT_EQUAL(both(x), (*b)((*a)(x)));
  EXPECT_EQ(both.named_slots()[2].first, "1.weight");
}

TEST(ModuleList, ReturnsModulesByType) {
  ModuleList list;
  auto module = list.push_back(std::make_shared<Linear>(3, 4));
  EXPECT_EQ(list.at<Linear>(0), module);
  EXPECT_ERROR(list.at<Embedding>(0), "type of the module to at()");
  EXPECT_ERROR(list.at<Linear>(1), "index 1 is out of range for a ModuleList of 1");
}

std::shared_ptr<testing::LayersOfEachKind> initialized() {
  auto model = std::make_shared<testing::LayersOfEachKind>();
  init_weights(*model, 1);
  return model;
}

const at::Tensor& tokens() {
  static const auto all = at::tensor({3, 0, 6, 1, 1}, at::kLong);
  return all;
}

void partition(const std::string& name, ModuleBase& module, const DeviceMesh& mesh) {
  if (name == "out") {
    distribute_parameter(*module.slot("weight"), mesh, {Shard{0}});
  }
}

void distribute_input(TensorList tensors, const DeviceMesh& mesh) {
  *tensors[0] = distribute_tensor(*tensors[0], mesh, {Replicate{}});
}

void gather_output(TensorList tensors, const DeviceMesh&) {
  *tensors[0] = DistributedTensor(*tensors[0]).full_tensor();
}

TEST_ON_MESH(DistributeModule, MatchesThePlainModule, {4}, {"tp"}) {
  const auto plain = initialized();
  const auto expected = (*plain)(tokens());
  expected.pow(2).sum().backward();
  const auto model = initialized();
  distribute_module(*model, mesh, &partition, &distribute_input, &gather_output);
  const auto found = (*model)(tokens());
  EXPECT_FALSE(tessera::is_distributed(found));
  EXPECT_CLOSE(found, expected);
  found.pow(2).sum().backward();
  testing::expect_gradients(*model, testing::gradients_of(*plain));
}

TEST_ON_MESH(DistributeModule, ReplicatesTheRemainingParametersOnce, {2}, {"tp"}) {
  const auto model = initialized();
  std::vector<std::string> visited;
  distribute_module(*model, mesh, [&](const std::string& name, ModuleBase& module, auto& on) {
    visited.push_back(name);
    partition(name, module, on);
  });
  EXPECT_EQ(visited, (std::vector<std::string>{"", "embed", "layers", "layers.0", "layers.1",
                                               "norm", "out"}));
  EXPECT_EQ(DistributedTensor(*model->out->weight).placements(), Placements{Shard{0}});
  EXPECT_EQ(DistributedTensor(*model->norm->weight).placements(), Placements{Replicate{}});
  EXPECT_EQ(DistributedTensor(*model->table).placements(), Placements{Replicate{}});
  EXPECT_TRUE(model->norm->weight->requires_grad());
  EXPECT_FALSE(model->table->requires_grad());
  EXPECT_ERROR(distribute_module(*model, mesh), "already");
}

using Names = std::vector<std::string>;

class StockModule : public torch::nn::Module {};

struct Tree : Module<Tree> {
  Tree() {
    block->push_back(std::make_shared<Linear>(1, 1));
    register_module("again", block);
    const auto stock = register_module("stock", std::make_shared<StockModule>());
    stock->register_module("inner", std::make_shared<Linear>(1, 1));
  }
  void forward() {}

  std::shared_ptr<ModuleList> block = register_module("block", std::make_shared<ModuleList>());
};

Names visited(Tree& tree, const detail::ModuleWalk& walk = {}) {
  Names names;
  visit_modules(
      tree, [&](const std::string& fqn, torch::nn::Module&) { names.push_back(fqn); }, walk);
  return names;
}

TEST(VisitModules, VisitsInTheRequestedOrder) {
  Tree tree;
  const auto is_block = [&](const torch::nn::Module& module) {
    return &module == tree.block.get();
  };
  EXPECT_EQ(visited(tree), (Names{"", "block", "block.0", "stock", "stock.inner"}));
  EXPECT_EQ(visited(tree, {.children_first = true}),
            (Names{"block.0", "block", "stock.inner", "stock", ""}));
  EXPECT_EQ(visited(tree, {.every_place = true}),
            (Names{"", "block", "block.0", "again", "again.0", "stock", "stock.inner"}));
  for (const bool every_place : {false, true}) {
    EXPECT_EQ(visited(tree, {.every_place = every_place, .skip = is_block}),
              (Names{"", "stock", "stock.inner"}));
  }
  Names of_bases;
  visit_modules(tree, [&](const std::string& fqn, ModuleBase&) { of_bases.push_back(fqn); });
  EXPECT_EQ(of_bases, (Names{"", "block", "block.0", "stock.inner"}));
}

TEST(VisitModules, ReadsAConstTree) {
  const Tree tree;
  std::size_t slots = 0;
  visit_modules(
      tree, [&](const std::string&, const ModuleBase& module) { slots += module.slots().size(); });
  EXPECT_EQ(slots, 4);
  std::size_t modules = 0;
  visit_modules(tree, [&](const std::string&, const torch::nn::Module&) { ++modules; });
  EXPECT_EQ(modules, 5);
}

}  // namespace
}  // namespace tessera::nn

namespace user {

struct Batch {
  at::Tensor tokens;
  std::optional<at::Tensor> mask;
  int count = 0;
};

template <class Visit>
void visit_tensors(Batch& batch, Visit&& visit) {
  visit(batch.tokens);
  tessera::nn::visit_tensors(batch.mask, visit);
}

}  // namespace user

namespace tessera::nn {
namespace {

at::Tensor number(int i) {
  return at::scalar_tensor(i);
}

template <class T>
std::vector<int> numbers(T value) {
  std::vector<int> found;
  for (const at::Tensor* tensor : detail::collect_tensors(value)) {
    found.push_back(tensor->item<int>());
  }
  return found;
}

using Ints = std::vector<int>;

TEST(VisitTensors, FindsTensorsInContainers) {
  EXPECT_EQ(numbers(number(1)), Ints{1});
  EXPECT_EQ(numbers(std::tuple(number(1), 7, std::pair(number(2), number(3)))), (Ints{1, 2, 3}));
  EXPECT_EQ(numbers(std::vector{number(1), number(2)}), (Ints{1, 2}));
  EXPECT_EQ(numbers(std::array{number(3), number(4)}), (Ints{3, 4}));
  EXPECT_EQ(numbers(std::optional(number(1))), Ints{1});
  EXPECT_EQ(numbers(std::optional<at::Tensor>()), Ints{});
  EXPECT_EQ(numbers(std::map<std::string, at::Tensor>{{"b", number(2)}, {"a", number(1)}}),
            (Ints{1, 2}));
  EXPECT_EQ(numbers(3), Ints{});
  EXPECT_EQ(numbers(std::string("x")), Ints{});
  EXPECT_EQ(numbers(std::vector<bool>{true}), Ints{});
}

TEST(VisitTensors, CallsAUsersOverload) {
  EXPECT_EQ(numbers(user::Batch{number(1), number(2)}), (Ints{1, 2}));
  EXPECT_EQ(numbers(std::vector{user::Batch{number(1), {}}, user::Batch{number(2), number(3)}}),
            (Ints{1, 2, 3}));
}

TEST(VisitTensors, ReplacesInPlaceAndVisitsUndefinedTensors) {
  auto value = std::tuple(number(1), std::vector{number(2)});
  for (at::Tensor* tensor : detail::collect_tensors(value)) {
    *tensor = *tensor * 10;
  }
  EXPECT_EQ(numbers(value), (Ints{10, 20}));
  std::tuple<at::Tensor, at::Tensor> undefined{at::Tensor(), number(1)};
  EXPECT_EQ(detail::collect_tensors(undefined).size(), 2U);
}

struct Row {
  const char* pattern;
  std::vector<const char*> matched, others;
};

TEST(FqnPattern, MatchesNames) {
  const std::vector<Row> rows{
      {"a.b.weight", {"a.b.weight"}, {"a.b"}},
      {"a.b", {}, {"a.b.weight"}},
      {"", {""}, {"a"}},
      // A star matches any characters within a component, or none.
      {"*", {"a"}, {"", "a.b"}},
      {"layers.*.w", {"layers.10.w"}, {"layers.0.1.w"}},
      {"layers.*", {}, {"layers.0.w"}},
      {"l.*_proj.w", {"l.q_proj.w"}, {"l.q_norm.w"}},
      {"l.*_*.w", {"l.up_proj_x.w"}, {}},
      {"a*a.b", {"aaa.b"}, {}},
      {"a*.c", {}, {"ab.d"}},
      {"a*.b*", {"a.b"}, {}},
      // A question mark matches exactly one character.
      {"layers.?.w", {"layers.3.w"}, {"layers.10.w"}},
      {"a?b", {}, {"a.b"}},
      // [abc] matches one of a, b and c. [!abc] and [^abc] match any other character.
      {"block*.mixer.[qkv]", {"block0.mixer.k"}, {"block0.mixer.o"}},
      {"layers.[0-3].w", {"layers.2.w"}, {"layers.4.w", "layers.22.w"}},
      {"[a-cx-z]", {"y"}, {}},
      {"[a-]", {"-"}, {}},
      {"layers.[!0-3]", {"layers.4"}, {"layers.3", "layers."}},
      {"layers.[^0-3]", {"layers.4"}, {"layers.3", "layers."}},
      {"a[!x]b", {}, {"a.b"}},
      {"a[b", {"a[b"}, {"ab"}},
      {"[]]", {"]"}, {}},
      {"[!]]", {"x"}, {}},
      // "**" matches any number of components. Inside a component, "**" is like "*".
      {"layers.**.w", {"layers.0.mlp.up.w", "layers.w"}, {"layers.0.mlp.b"}},
      {"**.w", {"w"}, {}},
      {"**.mlp.**", {"layers.0.mlp"}, {}},
      {"a.**.b.**.c", {"a.b.b.x.c"}, {"a.x.c"}},
      {"**", {"", "a.b"}, {}},
      {"a**c", {"abc"}, {"a.c"}},
      // A pattern with an empty component matches no name.
      {"layers.", {}, {"layers"}},
      {".layers", {}, {"layers"}}};
  for (const Row& row : rows) {
    for (const char* name : row.matched) {
      EXPECT_TRUE(matches_fqn(row.pattern, name)) << row.pattern << " " << name;
    }
    for (const char* name : row.others) {
      EXPECT_FALSE(matches_fqn(row.pattern, name)) << row.pattern << " " << name;
    }
  }
}

// An algorithm that backtracks over all stars would need exponential time for this pattern.
TEST(FqnPattern, MatchesManyStarsQuickly) {
  std::string stars, name, levels, path;
  for (int i = 0; i < 40; ++i) {
    stars += "*a";
    name += "aaa";
    levels += "**.a.";
    path += "a.a.a.";
  }
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(matches_fqn(stars + "b", name));
  EXPECT_FALSE(matches_fqn(levels + "b", path + "a"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

}  // namespace
}  // namespace tessera::nn
