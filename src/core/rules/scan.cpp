// Operators whose results along one dimension depend on all of it: softmax, scans, sorts, shifts.
// That dimension stays unsharded; all others are independent.
#include <optional>
#include <vector>

#include "rules/rule_builder.h"
#include "rules/rule_table.h"

namespace tessera::rules {
namespace {

/// For which reductions a partial first tensor gives partial results.
enum class Linearity {
  kNone,
  kLinear,  ///< sums and averages
  kMoves,   ///< every reduction: elements only change places
};

void add_linearity(ShardingRule& rule, Linearity linearity, int self) {
  if (linearity == Linearity::kLinear) {
    add_linear(rule, {self});
  }
  if (linearity == Linearity::kMoves) {
    add_any_linear(rule, {self});
  }
}

/// Aggregate with defaults: a row names only the exceptions.
struct Along {
  int dim = 1;  ///< argument with the dimension, or a list of them (none: all)
  std::size_t outputs = 1;
  Linearity linearity = Linearity::kNone;
};

/// Tensors of one shape. The named dimensions stay unsharded, the others are independent.
RuleFunction::Body along(Along along) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const std::vector<int> tensors = tensor_arguments(call);
    ShardingRule rule = start(call);
    const Sizes& sizes = call.tensor(0).sizes;
    const TensorFactors factors = add_factors(rule, sizes);
    const auto named = named_dims(call, static_cast<std::size_t>(along.dim), call.tensor(0).ndim());
    for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
      if (named[dim]) {
        keep_unsharded(rule, factors[dim]);
      }
    }
    for (int tensor : tensors) {
      // Backwards take several tensors, all of one shape; nothing here broadcasts.
      if (meta_of(call, tensor).sizes != sizes) {
        return std::nullopt;
      }
      input_of(rule, tensor) = factors;
    }
    rule.outputs.assign(along.outputs, factors);
    add_linearity(rule, along.linearity, tensors[0]);
    return rule;
  };
}

/// Likewise for the last `count` dimensions.
RuleFunction::Body along_last(std::size_t count, Linearity linearity) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const Sizes& sizes = call.tensor(0).sizes;
    if (sizes.size() < count) {
      return std::nullopt;
    }
    ShardingRule rule = start(call);
    const TensorFactors factors = add_factors(rule, sizes);
    for (std::size_t i = 1; i <= count; ++i) {
      keep_unsharded(rule, factors[sizes.size() - i]);
    }
    input_of(rule, call.tensor_index(0)) = factors;
    rule.outputs.push_back(factors);
    add_linearity(rule, linearity, call.tensor_index(0));
    return rule;
  };
}

/// cumsum(self, dim, dtype): with a cast, which comes first, it is not linear.
std::optional<ShardingRule> cumsum_rule(const OpCall& call) {
  return along({.linearity = call.is_none(2) ? Linearity::kLinear : Linearity::kNone})(call);
}

/// topk(self, k, dim, ...): the dimension stays unsharded and comes out with k elements.
std::optional<ShardingRule> topk_rule(const OpCall& call) {
  const int self = call.tensor_index(0), ndim = call.tensor(0).ndim();
  ShardingRule rule = start(call);
  TensorFactors factors = add_factors(rule, call.tensor(0).sizes);
  input_of(rule, self) = factors;
  if (ndim > 0) {
    const auto dim = static_cast<std::size_t>(wrap_dim(call, call.integer_or(2, -1), ndim));
    keep_unsharded(rule, factors[dim]);
    factors[dim] = {add_unsharded(rule, call.integer(1))};
  }
  rule.outputs.assign(2, factors);
  return rule;
}

/// renorm(self, p, dim, maxnorm): a norm over all dimensions but one.
std::optional<ShardingRule> renorm_rule(const OpCall& call) {
  const int ndim = call.tensor(0).ndim();
  ShardingRule rule = start(call);
  const TensorFactors factors = add_factors(rule, call.tensor(0).sizes);
  const int dim = wrap_dim(call, call.integer(2), ndim);
  for (int i = 0; i < ndim; ++i) {
    if (i != dim) {
      keep_unsharded(rule, factors[static_cast<std::size_t>(i)]);
    }
  }
  input_of(rule, call.tensor_index(0)) = factors;
  rule.outputs.push_back(factors);
  return rule;
}

/// glu(self, dim) halves a dimension; its backward(grad, self, dim) doubles it.
RuleFunction::Body glu(int self_arg, int dim_arg, bool backward) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const int self = call.tensor_index(static_cast<std::size_t>(self_arg));
    const int ndim = meta_of(call, self).ndim();
    if (ndim == 0) {
      return std::nullopt;
    }
    const auto dim = static_cast<std::size_t>(
        wrap_dim(call, call.integer_or(static_cast<std::size_t>(dim_arg), -1), ndim));
    ShardingRule rule = start(call);
    const TensorFactors full = add_factors(rule, meta_of(call, self).sizes);
    keep_unsharded(rule, full[dim]);
    TensorFactors half = full;
    half[dim] = {add_unsharded(rule, meta_of(call, self).sizes[dim] / 2)};
    input_of(rule, self) = full;
    if (backward) {
      input_of(rule, call.tensor_index(0)) = half;
      add_linear(rule, {call.tensor_index(0)});
    }
    rule.outputs.push_back(backward ? full : half);
    return rule;
  };
}

}  // namespace

Table scan_table() {
  return {"along a dimension",
          {
              {"_softmax _log_softmax _safe_softmax", along({})},
              {"{_softmax,_log_softmax}_backward_data",
               along({.dim = 2, .linearity = Linearity::kLinear})},
              {"cumsum{,_,.out}", cumsum_rule},
              {"cumprod{,_,.out} logcumsumexp{,.out}", along({})},
              {"cummax cummin", along({.outputs = 2})},
              {"cummaxmin_backward", along({.dim = 3})},
              {"sort{,.values}", along({.outputs = 2})},
              {"sort{.stable,.values_stable}", along({.dim = 2, .outputs = 2})},
              {"argsort", along({})},
              {"argsort.stable", along({.dim = 2})},
              {"topk{,.values}", topk_rule},
              {"flip", along({.linearity = Linearity::kMoves})},
              {"roll", along({.dim = 2, .linearity = Linearity::kMoves})},
              {"{tril,triu}{,_,.out}", along_last(2, Linearity::kLinear)},
              {"renorm{,_,.out}", renorm_rule},
              {"glu", glu(0, 1, false)},
              {"glu_backward", glu(1, 2, true)},
          }};
}

}  // namespace tessera::rules
