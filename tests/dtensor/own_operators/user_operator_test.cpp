#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <optional>

#include "dtensor/operators/operator_case.h"
#include "tessera/core/register_rule.h"
#include "tessera/dtensor/communication_scope.h"
#include "testing/distributed.h"

namespace tessera {
namespace {
namespace own_operators {

at::Tensor call_binary(const char* name, const at::Tensor& x, const at::Tensor& w) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow((std::string("own_gradients::") + name).c_str(), "")
      .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>()
      .call(x, w);
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor sin_of_product(const at::Tensor& x, const at::Tensor& w) {
  return (x * w).sin();
}

/// An operator whose backward is written by hand. Its autograd kernel is call().
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

/// An autograd function whose forward only calls operators of libtorch.
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

/// A sharding rule for elementwise operators (x, w). If `w` has fewer dimensions than `x`, `w` is
/// broadcast over the first dimensions of `x`.
std::optional<ShardingRule> elementwise(const OpCall& call) {
  ShardingRule rule;
  ShardingRule::TensorFactors dims;
  for (const std::int64_t size : call.tensor(0).sizes) {
    dims.push_back({static_cast<int>(rule.factors.size())});
    rule.factors.push_back({.size = size});
  }
  for (const TensorMeta& tensor : call.tensors) {
    rule.inputs.push_back({dims.end() - tensor.ndim(), dims.end()});
  }
  rule.outputs = {dims};
  return rule;
}

/// A sharding rule for a matrix product (a, b), which is linear in `a`.
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

TORCH_LIBRARY(own_gradients, library) {
  library.def("implicit(Tensor x, Tensor w) -> Tensor", &sin_of_product);
  library.def("explicit_with_autograd(Tensor x, Tensor w) -> Tensor");
  library.impl("explicit_with_autograd",
               torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &sin_of_product));
  library.impl("explicit_with_autograd",
               torch::dispatch(c10::DispatchKey::Autograd, &SinOfProduct::call));
  register_rule("own_gradients::explicit_with_autograd", &elementwise);
}

}  // namespace own_operators

// The following tests run operators of a user on distributed tensors, with and without a rule.

at::Tensor halve(const at::Tensor& x) {
  return x / 2;
}

at::Tensor& halve_(at::Tensor& x) {
  return x.div_(2);
}

at::Tensor scaled_product(const at::Tensor& a, const at::Tensor& b, double scale) {
  return at::mm(a, b) * scale;
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
  define("halve_unruled(Tensor x) -> Tensor", &halve);
  define("scaled_product(Tensor a, Tensor b, *, float scale) -> Tensor", &scaled_product);
  define("add_into(Tensor from, Tensor(a!) into) -> ()", &add_into);
  library.def("composite(Tensor x) -> Tensor", &halve);
  library.def("never_called(Tensor x) -> Tensor");
}

/// A sharding rule for linear elementwise operators: inputs may be Partial sums.
std::optional<ShardingRule> elementwise(const OpCall& call) {
  auto rule = own_operators::elementwise(call);
  rule->linear = {{{0}, ReduceOp::kSum}};
  return rule;
}

/// A sharding rule for add_into(), which returns nothing: the rule's output is the written tensor.
std::optional<ShardingRule> adding(const OpCall& call) {
  auto rule = own_operators::elementwise(call);
  rule->linear = {{{0, 1}, ReduceOp::kSum}};
  rule->inplace = {{.input = 1, .output = 0}};
  return rule;
}

const bool kUserRulesRegistered = [] {
  register_rule("tessera_test::halve", &elementwise);
  register_rule("tessera_test::halve_", &elementwise);
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

TEST(UserOperator, RunsInPlaceWithItsRule) {
  ASSERT_TRUE(kUserRulesRegistered);
  RunOnMesh({2}, {"x"}, [](const DeviceMesh& mesh) {
    const StrictScope strict;
    at::Tensor x = distribute_tensor(at::arange(5, at::kFloat), mesh, {Shard{0}});
    const at::Tensor alias = x;
    call<at::Tensor&(at::Tensor&)>("tessera_test::halve_", x);
    EXPECT_EQUAL(alias, at::arange(5, at::kFloat) / 2);
  });
}

TEST_ON_MESH(UserOperator, WithoutResultWritesToItsArgument, {2}, {"x"}) {
  const auto from = distribute_tensor(at::arange(5, at::kFloat), mesh, {Replicate{}});
  at::Tensor into = distribute_tensor(at::ones({5}), mesh, {Shard{0}});
  const CommunicationScope communication(mesh);
  call<void(const at::Tensor&, at::Tensor&)>("tessera_test::add_into", from, into);
  EXPECT_EQ(communication.total().calls, 0);
  EXPECT_EQUAL(into, at::arange(5, at::kFloat) + 1);
}

TEST_ON_MESH(UserOperator, FollowsTheFactorsOfItsRule, {2, 2}, {"x", "y"}) {
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

TEST_ON_MESH(UserOperator, WithoutARuleGathersItsArguments, {2}, {"x"}) {
  const auto x = distribute_tensor(at::arange(5, at::kFloat), mesh, {Shard{0}});
  const DistributedTensor y(unary("tessera_test::halve_unruled", x));
  EXPECT_EQ(y.placements(), Placements{Replicate{}});
  EXPECT_EQUAL(y, at::arange(5, at::kFloat) / 2);
}

TEST(UserOperator, AcceptsOneRuleBeforeItsFirstUse) {
  RunOnMesh({1}, {"x"}, [](const DeviceMesh& mesh) {
    unary("tessera_test::halve_unruled", distribute_tensor(at::ones({2}), mesh, {Shard{0}}));
  });
  EXPECT_ERROR(register_rule("tessera_test::halve_unruled", &elementwise), "first use");
  static const bool registered = [] {
    register_rule("tessera_test::never_called", &elementwise);
    return true;
  }();
  EXPECT_TRUE(registered);
  EXPECT_ERROR(register_rule("tessera_test::never_called", &elementwise), "for the second time");
}

/// Registers a rule for the operator `name`, then prints the error messages of two calls. Rules are
/// global, so the test runs this function in a separate process.
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

TEST(UserOperatorDeathTest, CallsFailAfterARuleForAnInvalidOperator) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      call_with_rule_of("tessera_test::halv"), ::testing::ExitedWithCode(0),
      "register_rule: there is no operator tessera_test::halv \\(tessera_test:: has .*halve.*\n"
      "register_rule: there is no operator tessera_test::halv");
  EXPECT_EXIT(call_with_rule_of("aten::add"), ::testing::ExitedWithCode(0),
              "its overloads are .*aten::add.Tensor");
  EXPECT_EXIT(call_with_rule_of("nobodys::own"), ::testing::ExitedWithCode(0),
              "no operator nobodys::own; correct the name");
  EXPECT_EXIT(call_with_rule_of("tessera_test::composite"), ::testing::ExitedWithCode(0),
              "register_rule: tessera_test::composite calls other operators");
}

TEST_ON_MESH(UserOperator, RuleCanReplaceARuleOfTheLibrary, {2}, {"x"}) {
  const auto whole = at::arange(6, at::kFloat);
  const at::Tensor x = distribute_tensor(whole, mesh, {Shard{0}});
  // The user's rule (nullopt) replicates at::hypot's result; the library's rule would shard it.
  const DistributedTensor result(at::hypot(x, x));
  EXPECT_EQ(result.placements(), Placements{Replicate{}});
  EXPECT_EQUAL(result, at::hypot(whole, whole));
}

using own_operators::call_binary;
using testing::Operators;
using testing::values;

/// Returns calls of a user's operators and of a user's autograd function.
testing::OperatorCases own_cases() {
  testing::OperatorCases c;
  c.add("implicit", {{5, 3}, {3}}, [](auto& t) { return call_binary("implicit", t[0], t[1]); });
  c.add("explicit", {{5, 3}, {3}},
        [](auto& t) { return call_binary("explicit_with_autograd", t[0], t[1]); });
  c.add("function_alone", {{5, 3}}, [](auto& t) { return own_operators::CubeByHand::apply(t[0]); });
  return c;
}

INSTANTIATE_TEST_SUITE_P(OfUsers, Operators, ::testing::ValuesIn(own_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_ON_MESH(UserOperator, WithoutAutogradKernelRefusesGradients, {2}, {"x"}) {
  at::Tensor x = distribute_tensor(values({4}), mesh, {Shard{0}}).tensor().detach();
  x.requires_grad_();
  EXPECT_ERROR(unary("tessera_test::halve", x), "tessera_test::halve", "DispatchKey::Autograd",
               "NoGradGuard");
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(unary("tessera_test::halve", x).requires_grad());
}

}  // namespace
}  // namespace tessera
