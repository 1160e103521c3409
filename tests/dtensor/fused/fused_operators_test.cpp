// What is asked of every operator of this library beside its values, which operators_test compares:
// that modes see it, that it has shapes without values, and what gradients it refuses.

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <set>

#include "dtensor/fused/attention_of_parts.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/core/detail/rule_functions.h"
#include "tessera/dtensor/detail/attention_kernel.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/kernels/fake_mode.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using testing::values;
using Tensors = std::vector<at::Tensor>;

struct Function {
  const char* name;  ///< of the operator, without "tessera::"
  Tensors inputs;
  std::size_t differentiable;  ///< how many of the first inputs have a gradient
  std::function<at::Tensor(const Tensors&)> run;
  std::vector<std::string> operators;  ///< of a forward and a backward
};

std::vector<Function> functions() {
  std::vector<Function> all;
  const auto add = [&](const char* name, const Tensors& inputs, std::size_t differentiable,
                       auto run, const std::vector<std::string>& operators) {
    all.push_back({name, inputs, differentiable, run, operators});
  };
  add("silu_mul", {values({4, 6}), values({4, 6}, 1)}, 2,
      [](const Tensors& t) { return detail::silu_mul(t[0], t[1]); },
      {"tessera::silu_mul", "tessera::silu_mul_backward"});
  add("rms_norm", {values({4, 6}), values({6}, 1)}, 2,
      [](const Tensors& t) { return detail::rms_norm(t[0], t[1], 1e-5); },
      {"tessera::rms_norm", "tessera::rms_norm_backward"});
  add("rms_norm", {values({4, 6}), values({4, 6}, 1), values({6}, 2)}, 3,
      [](const Tensors& t) {
        const auto [out, sum] = detail::add_rms_norm(t[0], t[1], t[2], 1e-5);
        return out * sum;
      },
      {"tessera::add_rms_norm", "tessera::rms_norm_backward"});
  add("dropout", {values({4, 6})}, 1,
      [](const Tensors& t) { return detail::dropout(t[0], 0.4, {1, 2}); },
      {"tessera::dropout", "tessera::dropout"});
  add("embedding", {values({4, 6}), at::tensor({2, 0, 2}, at::kLong)}, 1,
      [](const Tensors& t) { return detail::embedding(t[0], t[1]); },
      {"tessera::embedding", "tessera::embedding_backward"});
  add("cross_entropy", {values({4, 6}), at::tensor({2, 0, -100, 5}, at::kLong)}, 1,
      [](const Tensors& t) { return detail::cross_entropy(t[0], t[1]); },
      {"tessera::cross_entropy", "tessera::cross_entropy_backward"});
  add("rotary_embedding", {values({4, 3, 2, 4}), values({3, 4}, 1), values({3, 4}, 2)}, 1,
      [](const Tensors& t) { return detail::rotary_embedding(t[0], t[1], t[2]); },
      {"tessera::rotary_embedding", "tessera::rotary_embedding"});
  add("rotary_embedding",
      {values({4, 3, 2, 4}), values({4, 3, 1, 4}, 3), values({3, 4}, 1), values({3, 4}, 2)}, 2,
      [](const Tensors& t) {
        const auto [q, k] = detail::rotary_embedding(t[0], t[1], t[2], t[3]);
        return q * k;
      },
      {"tessera::rotary_embedding_qk", "tessera::rotary_embedding_qk"});
  add("chunked_attention",
      {values({4, 4, 6, 8}), values({4, 2, 12, 8}, 1), values({4, 2, 12, 8}, 2)}, 3,
      [](const Tensors& t) { return detail::chunked_attention(t[0], t[1], t[2], {3, 9}); },
      {"tessera::chunked_attention", "tessera::chunked_attention_backward"});
  add("fp8_linear", {values({4, 6}), values({5, 6}, 1)}, 2,
      [](const Tensors& t) { return detail::fp8_linear(t[0], t[1]); },
      {"tessera::fp8_linear", "tessera::fp8_linear_input_grad", "tessera::fp8_linear_weight_grad"});
  return all;
}

/// Lists the operators of this library, without what brings a gradient to its layout.
class ListingOfNames final : public OperatorMode {
 public:
  Results call(const Operator& op, const std::function<Results()>& run) override {
    if (op.name.starts_with("tessera::") && op.name != "tessera::redistribute") {
      names.push_back(op.name);
    }
    return run();
  }
  std::vector<std::string> names;
};

Tensors leaves_of(const Function& function, const Tensors& inputs) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) {
    leaves.push_back(input.detach().requires_grad_(leaves.size() < function.differentiable));
  }
  return leaves;
}

/// The inputs on a mesh of `world`, the first split by rows and those of its sizes too.
Tensors spread(const Tensors& inputs, const comm::WorldPtr& world) {
  const DeviceMesh mesh = init_device_mesh(world, {world->size()}, {"x"});
  Tensors distributed;
  for (const at::Tensor& input : inputs) {
    const bool split = input.sizes() == inputs.front().sizes();
    distributed.push_back(
        distribute_tensor(input, mesh, {split ? Placement(Shard{0}) : Placement(Replicate{})}));
  }
  return distributed;
}

TEST(FusedOperators, HaveARuleAndAreSeenByModesOnPlainAndDistributedTensors) {
  const auto ruled = ruled_operators();
  const std::set<std::string_view> rules(ruled.begin(), ruled.end());
  for (const Function& function : functions()) {
    const Tensors distributed = spread(function.inputs, comm::fake_world(0, 2));
    for (const Tensors& inputs : {function.inputs, distributed}) {
      ListingOfNames mode;
      const OperatorModeScope scope(mode);
      function.run(leaves_of(function, inputs)).sum().backward();
      EXPECT_EQ(mode.names, function.operators);
    }
    for (const std::string& name : function.operators) {
      EXPECT_TRUE(rules.contains(name)) << name;
    }
  }
}

TEST(FusedOperators, HaveShapesWithoutValues) {
  for (const Function& function : functions()) {
    const auto sizes = function.run(function.inputs).sizes().vec();
    Tensors meta;
    for (const at::Tensor& input : function.inputs) {
      meta.push_back(input.to(at::kMeta));
    }
    for (const Tensors& inputs : {meta, spread(meta, comm::meta_world(1, 2))}) {
      const Tensors leaves = leaves_of(function, inputs);
      const at::Tensor result = function.run(leaves);
      EXPECT_EQ(result.sizes().vec(), sizes) << function.name;
      result.sum().backward();
      EXPECT_EQ(leaves[0].grad().sizes(), leaves[0].sizes()) << function.name;
    }
  }
}

TEST(FusedOperators, TakeNoTimeForValuesInAFakeMode) {
  for (const Function& function : functions()) {
    const Tensors leaves = leaves_of(function, function.inputs);
    const kernels::FakeMode fake;
    function.run(leaves).sum().backward();
    EXPECT_EQ(leaves[0].grad().sizes(), leaves[0].sizes()) << function.name;
  }
}

TEST(FusedOperators, HaveNoSecondDerivativeAndOneBackward) {
  for (const Function& function : functions()) {
    const Tensors leaves = leaves_of(function, function.inputs);
    at::Tensor sum = function.run(leaves).sum();
    EXPECT_ERROR(torch::autograd::grad({sum}, {leaves[0]}, {}, std::nullopt, /*create_graph=*/true),
                 std::string(function.name) + " is differentiable once");
    if (function.inputs.size() > 1) {  // dropout keeps no tensor
      sum = function.run(leaves).sum();
      sum.backward();
      EXPECT_ANY_THROW(sum.backward()) << function.name;
    }
  }
}

TEST(FusedOperators, RunInInferenceMode) {
  for (const Function& function : functions()) {
    const at::Tensor expected = function.run(function.inputs);
    const c10::InferenceMode inference;
    EXPECT_TRUE(function.run(function.inputs).equal(expected)) << function.name;
    const Tensors distributed = spread(function.inputs, comm::fake_world(0, 1));
    EXPECT_TRUE(local_tensor(function.run(distributed)).equal(expected)) << function.name;
  }
}

/// Forward and backward, also of grouped heads, where each key-value head serves several.
TEST(Attention, IsOneRanksWhereBatchAndHeadsAreSplit) {
  for (const std::int64_t kv_heads : {4, 2}) {
    testing::expect_attention_of_parts(
        {values({3, 4, 5, 8}), values({3, kv_heads, 5, 8}, 1), values({3, kv_heads, 5, 8}, 2)},
        [](const Tensors& t) {
          return detail::attention(t[0], t[1], t[2], /*causal=*/true, {}, 0);
        });
  }
}

TEST(Attention, HasShapesWithoutValues) {
  const Tensors meta{values({2, 4, 5, 8}).to(at::kMeta), values({2, 2, 5, 8}).to(at::kMeta)};
  const DeviceMesh mesh = init_device_mesh(comm::meta_world(0, 2), {2}, {"tp"});
  Tensors split;
  for (const at::Tensor& x : meta) {
    split.push_back(distribute_tensor(x, mesh, {Shard{1}}));
  }
  for (const Tensors& t : {meta, split}) {
    const StrictScope nothing_moves;
    const at::Tensor result = detail::attention(t[0], t[1], t[1], true, {}, 0);
    EXPECT_EQ(result.sizes(), t[0].sizes());
    EXPECT_EQ(tessera::is_distributed(result), tessera::is_distributed(t[0]));
  }
}

TEST(FusedOperators, ABackwardIsNotDifferentiable) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tessera::silu_mul_backward", "");
  const at::Tensor x = values({4, 6}).requires_grad_();
  torch::jit::Stack stack{x, x, x};
  op.callBoxed(stack);
  EXPECT_ANY_THROW(stack[0].toTensor().sum().backward());
}

}  // namespace
}  // namespace tessera
