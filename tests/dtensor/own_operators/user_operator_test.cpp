#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dtensor/listing_mode.h"
#include "tessera/core/register_rule.h"
#include "tessera/dtensor/check_rule.h"
#include "tessera/dtensor/communication_scope.h"
#include "testing/distributed.h"

namespace tessera {
namespace {
namespace own_operators {

/// The operator own_gradients::`name`.
template <class Signature, class... Arguments>
auto call(const char* name, Arguments&&... arguments) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow((std::string("own_gradients::") + name).c_str(), "")
      .typed<Signature>()
      .call(std::forward<Arguments>(arguments)...);
}

at::Tensor call_binary(const char* name, const at::Tensor& x, const at::Tensor& w) {
  return call<at::Tensor(const at::Tensor&, const at::Tensor&)>(name, x, w);
}

at::Tensor call_unary(const char* name, const at::Tensor& x) {
  return call<at::Tensor(const at::Tensor&)>(name, x);
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Kernels. What is made of libtorch's operators autograd can record; what reads memory it cannot.

at::Tensor sin_of_product(const at::Tensor& x, const at::Tensor& w) {
  return (x * w).sin();
}

at::Tensor product_of_matrices(const at::Tensor& a, const at::Tensor& b) {
  return at::mm(a, b);
}

at::Tensor square_in_memory(const at::Tensor& x) {
  const at::Tensor in = x.contiguous();
  at::Tensor out = at::empty_like(in);
  for (std::int64_t i = 0; i < in.numel(); ++i) {
    const double value = in.const_data_ptr<double>()[i];
    out.mutable_data_ptr<double>()[i] = value * value;
  }
  return out;
}

at::Tensor& halve_in_place(at::Tensor& x) {
  return x.div_(2);
}

at::Tensor column_maximum(const at::Tensor& x) {
  return x.amax(0);
}

at::Tensor first_half(const at::Tensor& x) {
  return x.narrow(0, 0, x.size(0) / 2);
}

std::tuple<at::Tensor, at::Tensor> exp_and_sign(const at::Tensor& x,
                                                const std::optional<at::Tensor>& scale) {
  const at::Tensor scaled = scale ? x * *scale : x;
  return {scaled.exp(), scaled.gt(0).to(at::kLong)};
}

std::vector<at::Tensor> cubes(at::TensorList tensors) {
  std::vector<at::Tensor> results;
  for (const at::Tensor& tensor : tensors) {
    results.push_back(tensor.pow(3));
  }
  return results;
}

/// Its gradient is written out. As an autograd kernel, and called as it is.
struct SinOfProduct : torch::autograd::Function<SinOfProduct> {
  static at::Tensor call(const at::Tensor& x, const at::Tensor& w) { return apply(x, w); }
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_binary("explicit_with_autograd", x, w);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor inner = gradients[0] * (saved[0] * saved[1]).cos();
    return {inner * saved[1], (inner * saved[0]).sum_to_size(saved[1].sizes())};
  }
};

struct SquareInMemory : torch::autograd::Function<SquareInMemory> {
  static at::Tensor call(const at::Tensor& x) { return apply(x); }
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_unary("memory_with_autograd", x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {2 * gradients[0] * context->get_saved_variables()[0]};
  }
};

/// A Function without an operator: its forward is libtorch's operators.
struct CubeByHand : torch::autograd::Function<CubeByHand> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * x * x;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor x = context->get_saved_variables()[0];
    return {3 * gradients[0] * x * x};
  }
};

/// Element by element; a `w` of fewer dimensions is broadcast over the first ones of `x`.
std::optional<ShardingRule> elementwise(const OpCall& call, std::size_t outputs) {
  ShardingRule rule;
  ShardingRule::TensorFactors dims;
  for (const std::int64_t size : call.tensor(0).sizes) {
    dims.push_back({static_cast<int>(rule.factors.size())});
    rule.factors.push_back({.size = size});
  }
  for (const TensorMeta& tensor : call.tensors) {
    rule.inputs.push_back({dims.end() - tensor.ndim(), dims.end()});
  }
  rule.outputs.assign(outputs, dims);
  return rule;
}

std::optional<ShardingRule> elementwise_rule(const OpCall& call) {
  return elementwise(call, 1);
}

/// The rule of a matrix product (a, b), which is linear in a.
std::optional<ShardingRule> product_rule(const OpCall& call) {
  ShardingRule rule = rules::start(call);
  const int rows = rules::add_factor(rule, call.tensor(0).size(0));
  const int columns = rules::add_factor(rule, call.tensor(1).size(1));
  const int inner = rules::add_reduced(rule, call.tensor(0).size(1), ReduceOp::kSum);
  rule.inputs = {{{rows}, {inner}}, {{inner}, {columns}}};
  rule.outputs = {{{rows}, {columns}}};
  rule.linear = {{{0}, ReduceOp::kSum}};
  return rule;
}

void register_rules() {
  // libtorch warns at every such gradient.
  torch::autograd::setAutogradFallbackMode(torch::autograd::AutogradFallbackMode::Nothing);
  for (const char* name : {"explicit", "explicit_with_autograd", "kernel", "memory",
                           "memory_with_autograd", "halve_"}) {
    register_rule(std::string("own_gradients::") + name, &elementwise_rule);
  }
  register_rule("own_gradients::exp_and_sign",
                [](const OpCall& call) { return elementwise(call, 2); });
  register_rule("own_gradients::product", &product_rule);
  register_rule("own_gradients::column_maximum",
                [](const OpCall& call) -> std::optional<ShardingRule> {
                  ShardingRule rule = rules::start(call);
                  const int rows = rules::add_reduced(rule, call.tensor(0).size(0), ReduceOp::kMax);
                  const int columns = rules::add_unsharded(rule, call.tensor(0).size(1));
                  rule.inputs = {{{rows}, {columns}}};
                  rule.outputs = {{{columns}}};
                  return rule;
                });
}

TORCH_LIBRARY(own_gradients, library) {
  const auto define = [&](const char* schema, auto* kernel,
                          c10::DispatchKey key = c10::DispatchKey::CPU) {
    library.def(schema);
    library.impl(std::string(schema, std::strchr(schema, '(')).c_str(),
                 torch::dispatch(key, kernel));
  };
  const auto composite = c10::DispatchKey::CompositeExplicitAutograd;
  library.def("implicit(Tensor x, Tensor w) -> Tensor", &sin_of_product);
  define("explicit(Tensor x, Tensor w) -> Tensor", &sin_of_product, composite);
  define("explicit_with_autograd(Tensor x, Tensor w) -> Tensor", &sin_of_product, composite);
  define("kernel(Tensor x, Tensor w) -> Tensor", &sin_of_product);
  define("kernel_without_rule(Tensor x, Tensor w) -> Tensor", &sin_of_product);
  define("product(Tensor a, Tensor b) -> Tensor", &product_of_matrices);
  define("memory(Tensor x) -> Tensor", &square_in_memory);
  define("memory_with_autograd(Tensor x) -> Tensor", &square_in_memory);
  define("exp_and_sign(Tensor x, Tensor? scale) -> (Tensor, Tensor)", &exp_and_sign);
  define("cubes(Tensor[] tensors) -> Tensor[]", &cubes);
  define("halve_(Tensor(a!) x) -> Tensor(a!)", &halve_in_place);
  define("first_half(Tensor(a) x) -> Tensor(a)", &first_half);
  define("column_maximum(Tensor x) -> Tensor", &column_maximum);
  library.impl("explicit_with_autograd",
               torch::dispatch(c10::DispatchKey::Autograd, &SinOfProduct::call));
  library.impl("memory_with_autograd",
               torch::dispatch(c10::DispatchKey::Autograd, &SquareInMemory::call));
  register_rules();
}

}  // namespace own_operators

// A user's own operators on distributed tensors: with a rule of theirs, and without one.

at::Tensor halve(const at::Tensor& x) {
  return x / 2;
}

at::Tensor& halve_(at::Tensor& x) {
  return x.div_(2);
}

at::Tensor scaled_product(const at::Tensor& a, const at::Tensor& b, double scale) {
  return at::mm(a, b) * scale;
}

at::Tensor plus_one(const at::Tensor& x) {
  return x + 1;
}

void add_into(const at::Tensor& from, at::Tensor& into) {
  into.add_(from);
}

TORCH_LIBRARY(tessera_test, library) {
  const auto define = [&](const char* schema, auto* kernel) {
    library.def(schema);
    library.impl(std::string(schema, std::strchr(schema, '(')).c_str(),
                 torch::dispatch(c10::DispatchKey::CPU, kernel));
  };
  define("halve(Tensor x) -> Tensor", &halve);
  define("halve_(Tensor(a!) x) -> Tensor(a!)", &halve_);
  define("plus_one(Tensor x) -> Tensor", &plus_one);
  define("halve_unruled(Tensor x) -> Tensor", &halve);
  define("scaled_product(Tensor a, Tensor b, *, float scale) -> Tensor", &scaled_product);
  define("add_into(Tensor from, Tensor(a!) into) -> ()", &add_into);
  library.def("composite(Tensor x) -> Tensor", &halve);
  library.def("never_called(Tensor x) -> Tensor");
}

/// One factor for each dimension, in the input and the output alike; linear.
std::optional<ShardingRule> elementwise(const OpCall& call) {
  auto rule = own_operators::elementwise(call, 1);
  rule->linear = {{{0}, ReduceOp::kSum}};
  return rule;
}

/// The rule of add_into. The output is the tensor written to: nothing is returned.
std::optional<ShardingRule> adding(const OpCall& call) {
  auto rule = own_operators::elementwise(call, 1);
  rule->linear = {{{0, 1}, ReduceOp::kSum}};
  rule->inplace = {{.input = 1, .output = 0}};
  return rule;
}

const bool kUserRulesRegistered = [] {
  register_rule("tessera_test::halve", &elementwise);
  register_rule("tessera_test::halve_", &elementwise);
  register_rule("tessera_test::plus_one", &elementwise);  // is wrong: a sum's terms get one each
  register_rule("tessera_test::add_into", &adding);
  register_rule("aten::hypot", [](const OpCall&) -> std::optional<ShardingRule> { return {}; });
  register_rule("tessera_test::scaled_product", &own_operators::product_rule);
  return true;
}();

template <class Signature, class... Arguments>
auto call(const char* name, Arguments&&... arguments) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>().call(
      std::forward<Arguments>(arguments)...);
}

at::Tensor unary(const char* name, const at::Tensor& x) {
  return call<at::Tensor(const at::Tensor&)>(name, x);
}

TEST(UserOperator, RunsInPlaceByItsRule) {
  ASSERT_TRUE(kUserRulesRegistered);
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const StrictScope strict;
    at::Tensor x = distribute_tensor(at::arange(5, at::kFloat), mesh, {Shard{0}});
    const at::Tensor alias = x;
    call<at::Tensor&(at::Tensor&)>("tessera_test::halve_", x);
    EXPECT_EQUAL(alias, at::arange(5, at::kFloat) / 2);
  });
}

TEST_ON_MESH(UserOperator, ReturningNothingWritesByItsRule, {2}, {"x"}) {
  const auto from = distribute_tensor(at::arange(5, at::kFloat), mesh, {Replicate{}});
  at::Tensor into = distribute_tensor(at::ones({5}), mesh, {Shard{0}});
  const CommunicationScope communication(mesh);
  call<void(const at::Tensor&, at::Tensor&)>("tessera_test::add_into", from, into);
  EXPECT_EQ(communication.total().calls, 0);
  EXPECT_EQUAL(into, at::arange(5, at::kFloat) + 1);
}

TEST_ON_MESH(UserOperator, RunsAsItsFactorsSay, {2, 2}, {"x", "y"}) {
  const auto a = at::arange(15, at::kDouble).view({5, 3}), b = a.t().contiguous().cos();
  const auto product = [](const at::Tensor& left, const at::Tensor& right) {
    return call<at::Tensor(const at::Tensor&, const at::Tensor&, double)>(
        "tessera_test::scaled_product", left, right, 3.0);
  };
  struct Row {
    Placements a, b, result;
  };
  for (const Row& row :
       {Row{{Shard{0}, Replicate{}}, {Replicate{}, Shard{1}}, {Shard{0}, Shard{1}}},
        Row{{Shard{1}, Shard{0}}, {Shard{0}, Replicate{}}, {Partial{}, Shard{0}}},
        Row{{Partial{}, Replicate{}}, {Replicate{}, Shard{1}}, {Partial{}, Shard{1}}}}) {
    const auto left = distribute_tensor(a, mesh, row.a), right = distribute_tensor(b, mesh, row.b);
    const CommunicationScope communication(mesh);
    const DistributedTensor result(product(left, right));
    EXPECT_EQ(communication.total().calls, 0);
    EXPECT_EQ(result.placements(), row.result);
    EXPECT_CLOSE(result, product(a, b));
  }
}

TEST_ON_MESH(UserOperator, WithoutARuleIsGathered, {2}, {"x"}) {
  const auto x = distribute_tensor(at::arange(5, at::kFloat), mesh, {Shard{0}});
  const DistributedTensor y(unary("tessera_test::halve_unruled", x));
  EXPECT_EQ(y.placements(), Placements{Replicate{}});
  EXPECT_EQUAL(y, at::arange(5, at::kFloat) / 2);
}

TEST(UserOperator, TakesOneRuleBeforeItsFirstUse) {
  RunOnMesh({1}, {"x"}, [](const DeviceMesh& mesh) {
    unary("tessera_test::halve_unruled", distribute_tensor(at::ones({2}), mesh, {Shard{0}}));
  });
  EXPECT_ERROR(register_rule("tessera_test::halve_unruled", &elementwise), "first use");
  static const bool registered = [] {  // once, also where the test is repeated
    register_rule("tessera_test::never_called", &elementwise);
    return true;
  }();
  EXPECT_TRUE(registered);
  EXPECT_ERROR(register_rule("tessera_test::never_called", &elementwise), "for the second time");
}

/// The messages of two calls in a process that has registered a rule of `name`: rules are the
/// process's, so the others are spared it. A whole message is one line.
void call_with_rule_of(const std::string& name) {
  const auto mesh = init_device_mesh(comm::fake_world(0, 2), {2}, {"x"});
  register_rule(name, &elementwise);
  for (int i = 0; i < 2; ++i) {
    const at::Tensor x = at::ones({2});
    std::cerr << testing::message_of([&] {
      unary("tessera_test::halve_unruled", distribute_tensor(x, mesh, {Shard{0}}));
    }) << "\n";
  }
  std::exit(0);
}

TEST(UserOperatorDeathTest, FirstCallsFailAfterARuleOfNoOperatorOrACompositeOne) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(call_with_rule_of("tessera_test::halv"), ::testing::ExitedWithCode(0),
              "register_rule of tessera_test::halv, but there is no such operator "
              "\\(tessera_test:: has .*halve.*\n"
              "register_rule of tessera_test::halv, but");
  EXPECT_EXIT(call_with_rule_of("aten::add"), ::testing::ExitedWithCode(0),
              "its overloads are .*aten::add.Tensor");
  EXPECT_EXIT(call_with_rule_of("nobodys::own"), ::testing::ExitedWithCode(0),
              "no such operator: correct the name");
  EXPECT_EXIT(call_with_rule_of("tessera_test::composite"), ::testing::ExitedWithCode(0),
              "register_rule of tessera_test::composite, which is made of other operators");
}

TEST_ON_MESH(UserOperator, MayReplaceARuleOfTheLibrary, {2}, {"x"}) {
  const auto whole = at::arange(6, at::kFloat);
  const at::Tensor x = distribute_tensor(whole, mesh, {Shard{0}});
  // The library's rule would keep it split; the one above declines every call.
  const DistributedTensor result(at::hypot(x, x));
  EXPECT_EQ(result.placements(), Placements{Replicate{}});
  EXPECT_EQUAL(result, at::hypot(whole, whole));
}

TEST(CheckRule, TellsARightRuleFromAWrongOne) {
  const at::Tensor x = testing::values({5, 3});
  // Replicated, both dimensions, and at least a pending sum.
  EXPECT_GE(check_rule("tessera_test::halve", {x}), 4);
  EXPECT_GE(check_rule("tessera_test::halve_", {x}, 2), 3);
  EXPECT_GE(check_rule("tessera_test::scaled_product", {x, testing::values({3, 4}), 0.5}), 5);
  EXPECT_GE(check_rule("tessera_test::add_into", {x, testing::values({5, 3}, 1)}), 4);
  // A wrong one, and calls that cannot be compared.
  EXPECT_ERROR(check_rule("tessera_test::plus_one", {testing::values({5, 3})}),
               "check_rule: tessera_test::plus_one of [Partial(sum)]: result 0, as [Partial(sum)], "
               "has other values than of plain tensors");
  EXPECT_ERROR(check_rule("tessera_test::halve", {}), "takes 1 arguments, 0 were given");
  EXPECT_ERROR(check_rule("aten::bernoulli_.float", {testing::values({3}), 0.5, c10::IValue()}),
               "draws random numbers");
}

// Gradients of operators that are not libtorch's, in each way of implementing one: those of one
// rank, or an error.

using own_operators::call_binary;
using own_operators::call_unary;
using testing::values;

// One rank's result and gradients.

using Function = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

struct Outcome {
  at::Tensor result;
  std::vector<at::Tensor> gradients;
};

Outcome differentiate(const Function& function, std::vector<at::Tensor> inputs) {
  for (at::Tensor& input : inputs) {
    input = input.detach();
    input.requires_grad_();
  }
  Outcome outcome{function(inputs), {}};
  outcome.result.square().sum().backward();
  for (const at::Tensor& input : inputs) {
    outcome.gradients.push_back(input.grad());
  }
  return outcome;
}

void expect_same(const at::Tensor& found, const at::Tensor& expected) {
  ASSERT_EQ(found.defined(), expected.defined());
  if (expected.defined()) {
    EXPECT_CLOSE(found, expected.detach());
  }
}

/// On every rank of a mesh of 2 × 2 the same as on one rank.
void expect_gradients_of_one_rank(const Function& function, const std::vector<at::Tensor>& inputs,
                                  const std::vector<std::vector<Placements>>& rows) {
  const Outcome expected = differentiate(function, inputs);
  RunOnMesh({2, 2}, {"dp", "tp"}, [&](const DeviceMesh& mesh) {
    for (const std::vector<Placements>& row : rows) {
      std::vector<at::Tensor> distributed;
      std::string what;
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        distributed.push_back(distribute_tensor(inputs[i], mesh, row[i]));
        what += to_string(row[i]) + " ";
      }
      const Outcome found = differentiate(function, distributed);
      SCOPED_TRACE(what);
      expect_same(found.result, expected.result);
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        SCOPED_TRACE("gradient " + std::to_string(i));
        expect_same(found.gradients[i], expected.gradients[i]);
      }
    }
  });
}

at::Tensor leaf(const at::Tensor& value, const DeviceMesh& mesh, const Placement& placement) {
  return distribute_tensor(value, mesh, {placement}).tensor().detach().requires_grad_();
}

const Placement kAll = Replicate{}, kRows = Shard{0}, kColumns = Shard{1}, kSum = Partial{};

TEST(OwnOperatorGradients, AreThoseOfOneRankHoweverTheOperatorIsImplemented) {
  for (const char* name :
       {"implicit", "explicit", "explicit_with_autograd", "kernel", "kernel_without_rule"}) {
    SCOPED_TRACE(name);
    const auto call = [name](const std::vector<at::Tensor>& inputs) {
      return call_binary(name, inputs[0], inputs[1]);
    };
    // Sizes that do not divide, and a weight that is broadcast over the rows.
    expect_gradients_of_one_rank(call, {values({5, 3}), values({3})},
                                 {{{kRows, kAll}, {kAll, kAll}},
                                  {{kAll, kRows}, {kAll, kAll}},
                                  {{kRows, kColumns}, {kAll, kRows}},
                                  {{kRows, kRows}, {kAll, kAll}},
                                  {{kColumns, kAll}, {kAll, kAll}},
                                  {{kAll, kAll}, {kAll, kAll}},
                                  {{kSum, kRows}, {kAll, kSum}}});
  }
}

TEST(OwnOperatorGradients, AreSummedWhereTheResultIs) {
  const auto call = [](const std::vector<at::Tensor>& inputs) {
    return call_binary("product", inputs[0], inputs[1]);
  };
  expect_gradients_of_one_rank(call, {values({5, 3}), values({3, 7})},
                               {{{kColumns, kAll}, {kRows, kAll}},
                                {{kRows, kColumns}, {kAll, kRows}},
                                {{kRows, kAll}, {kAll, kColumns}},
                                {{kSum, kAll}, {kAll, kColumns}},
                                {{kSum, kSum}, {kAll, kAll}}});
}

TEST(OwnOperatorGradients, WorkForAFunctionWithoutAnOperator) {
  expect_gradients_of_one_rank(
      [](const std::vector<at::Tensor>& inputs) {
        return own_operators::CubeByHand::apply(inputs[0]);
      },
      {values({5, 3})}, {{{kRows, kColumns}}, {{kSum, kAll}}});
}

// libtorch's operators in the kernel leave nothing to record: libtorch warns in backward.
TEST(OwnOperatorGradients, AreAbsentWithoutAnAutogradKernelAsOnOneRank) {
  using torch::autograd::AutogradFallbackMode;
  const auto call = [](const std::vector<at::Tensor>& inputs) {
    return call_unary("memory", inputs[0]) + inputs[0];
  };
  for (const auto mode : {AutogradFallbackMode::Warn, AutogradFallbackMode::Nothing}) {
    torch::autograd::setAutogradFallbackMode(mode);
    expect_gradients_of_one_rank(call, {values({5, 3})}, {{{kRows, kAll}}});
  }
}

TEST(OwnOperatorGradients, PassOptionalTensorsAndResultsOfIntegers) {
  const auto first = [](const std::vector<at::Tensor>& inputs) {
    const auto [result, sign] = own_operators::call<std::tuple<at::Tensor, at::Tensor>(
        const at::Tensor&, const std::optional<at::Tensor>&)>(
        "exp_and_sign", inputs[0], inputs.size() > 1 ? std::optional(inputs[1]) : std::nullopt);
    EXPECT_FALSE(sign.requires_grad());
    return result;
  };
  expect_gradients_of_one_rank(first, {values({5, 3}), values({3})},
                               {{{kRows, kAll}, {kAll, kAll}}, {{kAll, kColumns}, {kAll, kRows}}});
  expect_gradients_of_one_rank(first, {values({5, 3})}, {{{kRows, kAll}}});
}

TEST(OwnOperatorGradients, PassListsOfTensors) {
  const auto call = [](const std::vector<at::Tensor>& inputs) {
    const auto results =
        own_operators::call<std::vector<at::Tensor>(at::TensorList)>("cubes", inputs);
    return results[0] + results[1];
  };
  expect_gradients_of_one_rank(call, {values({5, 3}), values({5, 3})},
                               {{{kRows, kAll}, {kAll, kColumns}}});
}

TEST(OwnOperatorGradients, HaveGradients) {
  const auto norm_of_gradient = [](const std::vector<at::Tensor>& inputs) {
    const at::Tensor loss = call_binary("kernel", inputs[0], inputs[1]).square().sum();
    return torch::autograd::grad({loss}, inputs, {}, true, /*create_graph=*/true)[1];
  };
  expect_gradients_of_one_rank(norm_of_gradient, {values({5, 3}), values({3})},
                               {{{kRows, kColumns}, {kAll, kRows}}, {{kAll, kRows}, {kAll, kAll}}});
}

TEST_ON_MESH(OwnOperatorGradients, SendWhatTheRuleImplies, {2}, {"dp"}) {
  const auto x = leaf(values({6, 3}), mesh, Shard{0}), w = leaf(values({3}), mesh, Replicate{});
  const StrictScope strict;
  const CommunicationScope communication(mesh);
  const at::Tensor result = call_binary("kernel", x, w);
  EXPECT_EQ(communication.total().calls, 0);
  EXPECT_EQ(DistributedTensor(result).placements(), Placements{Shard{0}});
  result.backward(at::ones_like(result));
  EXPECT_EQ(communication.total().calls, 1);  // the sum of the weight's gradient
}

TEST_ON_MESH(OwnOperatorGradients, ReachAPlainTensorOfOneElement, {2}, {"dp"}) {
  const at::Tensor plain_x = values({6, 3});
  const auto gradient_of_factor = [](const at::Tensor& x) {
    at::Tensor factor = at::full({1}, 0.5, at::kDouble).requires_grad_();
    call_binary("kernel_without_rule", x, factor).square().sum().backward();
    return factor.grad();
  };
  const at::Tensor expected = gradient_of_factor(plain_x);
  const at::Tensor x = distribute_tensor(plain_x, mesh, {Shard{0}}).tensor().detach();
  EXPECT_ERROR(gradient_of_factor(x), "a plain number with a gradient may be another");
  const ReplicationScope same_on_every_rank;
  EXPECT_TRUE(at::allclose(gradient_of_factor(x), expected));
}

TEST_ON_MESH(OwnOperatorGradients, AreNotWantedWithoutGradMode, {2}, {"dp"}) {
  const auto x = leaf(values({6, 3}), mesh, Shard{0});
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(call_unary("memory", x).requires_grad());
  at::Tensor copy = x.clone();
  EXPECT_TRUE(own_operators::call<at::Tensor&(at::Tensor&)>("halve_", copy).is_same(copy));
}

TEST_ON_MESH(OwnOperatorGradients, AreAnErrorWhereTheyCannotBeRecorded, {2}, {"dp"}) {
  const auto x = leaf(values({6, 3}), mesh, Shard{0});
  at::Tensor copy = x.clone();
  EXPECT_ERROR(own_operators::call<at::Tensor&(at::Tensor&)>("halve_", copy),
               "own_gradients::halve_", "writes to an argument", "DispatchKey::Autograd",
               "NoGradGuard");
  EXPECT_ERROR(call_unary("first_half", x), "own_gradients::first_half", "returns a view",
               "DispatchKey::Autograd");
  EXPECT_ERROR(call_unary("column_maximum", x), "own_gradients::column_maximum", "Partial(max)",
               "DispatchKey::Autograd");
}

// A mode may give results back later, which then would belong to an older graph.
TEST_ON_MESH(OwnOperatorGradients, AreRecordedWithoutTheModesSeeingIt, {2}, {"dp"}) {
  const auto x = leaf(values({6, 3}), mesh, Shard{0});
  ListingMode mode;
  {
    const OperatorModeScope scope(mode);
    EXPECT_TRUE(call_binary("kernel", x, x).requires_grad());
    EXPECT_TRUE(mode.names.empty());
    call_binary("explicit_with_autograd", x, x);
  }
  EXPECT_EQ(mode.names, std::vector<std::string>{"own_gradients::explicit_with_autograd"});
}

}  // namespace
}  // namespace tessera
