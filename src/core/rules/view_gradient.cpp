// Backwards of views: they put a gradient into zeros of the sizes of the viewed tensor, or a tensor
// into a copy (the scatters). As in the view, the dimension where it is placed stays unsharded.
#include <cstddef>
#include <optional>
#include <utility>

#include "rules/rule_builder.h"
#include "rules/rule_table.h"

namespace tessera::rules {
namespace {

/// Completes the rule of operator(grad, sizes, ...), which is linear in the gradient.
ShardingRule linear_in_gradient(const OpCall& call, ShardingRule rule, const TensorFactors& grad,
                                const TensorFactors& result) {
  input_of(rule, call.tensor_index(0)) = grad;
  rule.outputs.push_back(result);
  rule.size_arguments.push_back({1, 0});
  add_linear(rule, {call.tensor_index(0)});
  return rule;
}

/// select_backward(grad, sizes, dim, ...) and slice_backward: zeros, with the gradient at its
/// place.
RuleFunction::Body place_gradient(bool keeps_dim) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const Sizes sizes = call.integers(1);
    if (sizes.empty()) {
      return std::nullopt;
    }
    const int dim = wrap_dim(call, call.integer(2), static_cast<int>(sizes.size()));
    ShardingRule rule = start(call);
    const TensorFactors result = add_factors(rule, sizes);
    TensorFactors grad = result;
    keep_unsharded(rule, result[static_cast<std::size_t>(dim)]);
    if (keeps_dim) {
      grad[static_cast<std::size_t>(dim)] = {add_unsharded(rule, call.tensor(0).size(dim))};
    } else {
      grad.erase(grad.begin() + dim);
    }
    return linear_in_gradient(call, std::move(rule), grad, result);
  };
}

/// select_scatter(self, src, dim, ...) and slice_scatter: a copy of self, with src at its place.
RuleFunction::Body place_source(bool keeps_dim) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const int self = call.tensor_index(0), source = call.tensor_index(1);
    if (meta_of(call, self).ndim() == 0) {
      return std::nullopt;
    }
    const auto dim =
        static_cast<std::size_t>(wrap_dim(call, call.integer_or(2, 0), meta_of(call, self).ndim()));
    ShardingRule rule = start(call);
    const TensorFactors result = add_factors(rule, meta_of(call, self).sizes);
    keep_unsharded(rule, result[dim]);
    input_of(rule, self) = result;
    TensorFactors placed = result;
    if (keeps_dim) {
      placed[dim] = {add_unsharded(rule, meta_of(call, source).sizes.at(dim))};
    } else {
      placed.erase(placed.begin() + static_cast<std::ptrdiff_t>(dim));
    }
    if (placed.size() != meta_of(call, source).sizes.size()) {
      return std::nullopt;
    }
    input_of(rule, source) = placed;
    rule.outputs.push_back(result);
    add_any_linear(rule, {self, source});
    return rule;
  };
}

/// unfold_backward(grad, sizes, dim, ...): the last dimension of the gradient is the window.
std::optional<ShardingRule> unfold_backward_rule(const OpCall& call) {
  const Sizes sizes = call.integers(1);
  if (sizes.empty()) {
    return std::nullopt;
  }
  const auto dim =
      static_cast<std::size_t>(wrap_dim(call, call.integer(2), static_cast<int>(sizes.size())));
  ShardingRule rule = start(call);
  const TensorFactors result = add_factors(rule, sizes);
  TensorFactors grad = result;
  keep_unsharded(rule, result[dim]);
  // Neither windows nor the place within one have a counterpart in the result.
  grad[dim].clear();
  grad.emplace_back();
  return linear_in_gradient(call, std::move(rule), grad, result);
}

/// diagonal_backward(grad, sizes, offset, dim1, dim2): the last dimension of the gradient is the
/// diagonal.
std::optional<ShardingRule> diagonal_backward_rule(const OpCall& call) {
  const Sizes sizes = call.integers(1);
  const auto ndim = static_cast<int>(sizes.size());
  ShardingRule rule = start(call);
  const TensorFactors result = add_factors(rule, sizes);
  const int rows = wrap_dim(call, call.integer(3), ndim);
  const int columns = wrap_dim(call, call.integer(4), ndim);
  TensorFactors grad;
  for (int dim = 0; dim < ndim; ++dim) {
    const Factors& factors = result[static_cast<std::size_t>(dim)];
    if (dim == rows || dim == columns) {
      keep_unsharded(rule, factors);
    } else {
      grad.push_back(factors);
    }
  }
  grad.emplace_back();
  return linear_in_gradient(call, std::move(rule), grad, result);
}

}  // namespace

Table view_gradient_table() {
  return {"gradients of views",
          {
              {"select_backward", place_gradient(false)},
              {"slice_backward", place_gradient(true)},
              {"unfold_backward", unfold_backward_rule},
              {"diagonal_backward", diagonal_backward_rule},
              {"select_scatter", place_source(false)},
              {"slice_scatter", place_source(true)},
          }};
}

}  // namespace tessera::rules
