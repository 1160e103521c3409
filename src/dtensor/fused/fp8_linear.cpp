// The product of a linear layer in eight bits, with its two gradients. Rows are scaled by what a
// rank has of them, so that nothing is communicated for a scale: a part's values are the row's but
// where they are subnormal (kernels/fp8.h). Rounding is not linear: pending sums are reduced first.

#include "fused/fused_operator.h"
#include "tessera/core/error.h"
#include "tessera/core/rule_builder.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/kernels/fp8.h"

namespace tessera::detail {
namespace {

using ProductOfTwo = at::Tensor(const at::Tensor&, const at::Tensor&);

struct Fp8Linear : FusedOperator<Fp8Linear, ProductOfTwo> {
  static constexpr const char* name = "tessera::fp8_linear";
  static constexpr const char* signature = "(Tensor x, Tensor weight) -> Tensor";
};

struct Fp8LinearInputGrad : FusedOperator<Fp8LinearInputGrad, ProductOfTwo> {
  static constexpr const char* name = "tessera::fp8_linear_input_grad";
  static constexpr const char* signature = "(Tensor grad, Tensor weight) -> Tensor";
};

struct Fp8LinearWeightGrad : FusedOperator<Fp8LinearWeightGrad, ProductOfTwo> {
  static constexpr const char* name = "tessera::fp8_linear_weight_grad";
  static constexpr const char* signature = "(Tensor grad, Tensor x) -> Tensor";
};

void check_sizes(c10::IntArrayRef x, c10::IntArrayRef weight) {
  TESSERA_CHECK(!x.empty() && weight.size() == 2 && x.back() == weight.back(),
                "fp8_linear of sizes ", x, " was asked for with a weight of sizes ", weight,
                "; it takes (..., in) and (out, in)");
}

at::Tensor run_fp8_linear(const at::Tensor& x, const at::Tensor& weight) {
  check_sizes(x.sizes(), weight.sizes());
  TESSERA_CHECK(x.scalar_type() == weight.scalar_type(), "fp8_linear of tensors of types ",
                x.scalar_type(), " and ", weight.scalar_type(), " was asked for; they must agree");
  return kernels::fp8_linear(x, weight);
}

/// The factors of the rows, reduced where a result has none of them, and of one more dimension.
rules::TensorFactors row_factors(ShardingRule& rule, const rules::Sizes& sizes, bool reduced) {
  rules::TensorFactors factors;
  for (std::size_t i = 0; i + 1 < sizes.size(); ++i) {
    factors.push_back({reduced ? rules::add_reduced(rule, sizes[i], ReduceOp::kSum)
                               : rules::add_factor(rule, sizes[i])});
  }
  return factors;
}

rules::TensorFactors with(rules::TensorFactors rows, int last) {
  rows.push_back({last});
  return rows;
}

std::optional<ShardingRule> fp8_linear_rule(const OpCall& call) {
  const rules::Sizes& x = call.tensor(0).sizes;
  const rules::Sizes& weight = call.tensor(1).sizes;
  check_sizes(x, weight);
  ShardingRule rule = rules::start(call);
  const rules::TensorFactors rows = row_factors(rule, x, /*reduced=*/false);
  const int in = rules::add_reduced(rule, weight[1], ReduceOp::kSum);
  const int out = rules::add_factor(rule, weight[0]);
  rule.inputs = {with(rows, in), {{out}, {in}}};
  rule.outputs = {with(rows, out)};
  return rule;
}

std::optional<ShardingRule> input_grad_rule(const OpCall& call) {
  const rules::Sizes& weight = call.tensor(1).sizes;
  ShardingRule rule = rules::start(call);
  const rules::TensorFactors rows = row_factors(rule, call.tensor(0).sizes, /*reduced=*/false);
  const int out = rules::add_reduced(rule, weight[0], ReduceOp::kSum);
  const int in = rules::add_factor(rule, weight[1]);
  rule.inputs = {with(rows, out), {{out}, {in}}};
  rule.outputs = {with(rows, in)};
  return rule;
}

std::optional<ShardingRule> weight_grad_rule(const OpCall& call) {
  const rules::Sizes& grad = call.tensor(0).sizes;
  ShardingRule rule = rules::start(call);
  const rules::TensorFactors rows = row_factors(rule, grad, /*reduced=*/true);
  const int out = rules::add_factor(rule, grad.back());
  const int in = rules::add_factor(rule, call.tensor(1).sizes.back());
  rule.inputs = {with(rows, out), with(rows, in)};
  rule.outputs = {{{out}, {in}}};
  return rule;
}

struct Fp8LinearNode final : FusedNode {
  Fp8LinearNode() : FusedNode("fp8_linear", "Fp8LinearBackward") {}

 private:
  torch::autograd::variable_list differentiate(const at::Tensor& gradient) override {
    return {
        task_should_compute_output(0) ? Fp8LinearInputGrad::call(gradient, saved(1)) : at::Tensor(),
        task_should_compute_output(1) ? Fp8LinearWeightGrad::call(gradient, saved(0))
                                      : at::Tensor()};
  }
};

at::Tensor differentiable_fp8_linear(const at::Tensor& x, const at::Tensor& weight) {
  const auto node = node_for<Fp8LinearNode>(x, weight);
  if (node != nullptr) {
    // In their own types: backward scales other rows of x, and FSDP gathers the weight again.
    node->save(x, weight);
  }
  return recorded(node, Fp8Linear::call_below_autograd(x, weight));
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  define<Fp8Linear>(library, &run_fp8_linear, fp8_linear_rule, &differentiable_fp8_linear);
  define<Fp8LinearInputGrad>(library, &kernels::fp8_linear_input_grad, input_grad_rule);
  define<Fp8LinearWeightGrad>(library, &kernels::fp8_linear_weight_grad, weight_grad_rule);
}

}  // namespace

at::Tensor fp8_linear(const at::Tensor& x, const at::Tensor& weight) {
  return Fp8Linear::call(x, weight);
}

at::Tensor fp8_linear_input_grad(const at::Tensor& grad, const at::Tensor& weight) {
  return Fp8LinearInputGrad::call(grad, weight);
}

at::Tensor fp8_linear_weight_grad(const at::Tensor& grad, const at::Tensor& x) {
  return Fp8LinearWeightGrad::call(grad, x);
}

}  // namespace tessera::detail
