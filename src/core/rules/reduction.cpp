#include <cmath>
#include <optional>
#include <vector>

#include "rules/rule_table.h"

namespace tessera::rules {

// The rules of reductions. If a reduced dimension is sharded, the result is Partial, and is reduced
// when its value is needed.

namespace {

/// Indices of a reduction operator's arguments in its schema; -1 for a missing argument.
struct Arguments {
  int dim = -1;  ///< index of the argument that lists the reduced dimensions; None: all
  ///< If `dim` is -1, the operator always reduces all dimensions.
  int keepdim = -1;
  int dtype = -1;
};

/// What a reduction computes. kCount: as kSum, but a Partial input is not allowed (counts, norms).
/// kUnsharded: the shards' results cannot be combined, so reduced dimensions are not sharded.
enum class Kind { kSum, kCount, kProduct, kMax, kMin, kAny, kAll, kUnsharded };

/// Returns the reduction that combines the results of shards. For bools, "any" is a maximum and
/// "all" a minimum.
std::optional<ReduceOp> reduction_of(Kind kind) {
  switch (kind) {
    case Kind::kSum:
    case Kind::kCount:
      return ReduceOp::kSum;
    case Kind::kProduct:
      return ReduceOp::kProduct;
    case Kind::kMax:
    case Kind::kAny:
      return ReduceOp::kMax;
    case Kind::kMin:
    case Kind::kAll:
      return ReduceOp::kMin;
    case Kind::kUnsharded:
      return std::nullopt;
  }
  return std::nullopt;
}

std::vector<bool> reduced_dims(const OpCall& call, const Arguments& arguments, int ndim) {
  return arguments.dim < 0 ? std::vector<bool>(static_cast<std::size_t>(ndim), true)
                           : named_dims(call, static_cast<std::size_t>(arguments.dim), ndim);
}

/// Adds the factor (einsum index letter) of a reduced dimension. No shard of a maximum or minimum
/// may be empty, because libtorch throws for empty tensors.
int add_reduced_dim(ShardingRule& rule, std::int64_t size, Kind kind) {
  const std::optional<ReduceOp> op = reduction_of(kind);
  if (!op) {
    return add_unsharded(rule, size);
  }
  const int factor = add_reduced(rule, size, *op);
  rule.factors.back().allow_empty = kind != Kind::kMax && kind != Kind::kMin;
  return factor;
}

/// Declares the reductions for which a Partial input of the operator gives a Partial result.
void add_linearity(ShardingRule& rule, Kind kind, int self) {
  if (kind == Kind::kSum) {
    add_linear(rule, {self});
  } else if (kind == Kind::kProduct || kind == Kind::kMax || kind == Kind::kMin) {
    add_linear(rule, {self}, {*reduction_of(kind)});
  }
}

/// Returns the rule of a reduction of the first tensor. If a dtype argument casts the input,
/// Partial is not allowed, because each term would be rounded.
ShardingRule reduction_rule(const OpCall& call, Kind kind, const Arguments& arguments,
                            std::size_t outputs) {
  const int self = call.tensor_index(0);
  const Sizes& sizes = meta_of(call, self).sizes;
  const std::vector<bool> reduced = reduced_dims(call, arguments, meta_of(call, self).ndim());
  const bool keepdim =
      arguments.keepdim >= 0 && call.boolean_or(static_cast<std::size_t>(arguments.keepdim), false);
  ShardingRule rule = start(call);
  TensorFactors result;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    const Factors factors{reduced[dim] ? add_reduced_dim(rule, sizes[dim], kind)
                                       : add_factor(rule, sizes[dim])};
    input_of(rule, self)[dim] = factors;
    if (!reduced[dim]) {
      result.push_back(factors);
    } else if (keepdim) {
      result.push_back({});
    }
  }
  rule.outputs.assign(outputs, result);
  const bool casts =
      arguments.dtype >= 0 && !call.is_none(static_cast<std::size_t>(arguments.dtype));
  if (!casts) {
    add_linearity(rule, kind, self);
  }
  return rule;
}

RuleFunction::Body reduction(Kind kind, Arguments arguments, std::size_t outputs = 1) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    return reduction_rule(call, kind, arguments, outputs);
  };
}

/// The rule of a mean: the sum of the shards' sums, divided by the global number of elements. In
/// half precision, where sums could overflow, the means of equal shards are averaged.
std::optional<ShardingRule> mean_rule(const OpCall& call) {
  const bool by_dim = call.op != "aten::mean";
  const Arguments arguments = by_dim ? Arguments{1, 2, 3} : Arguments{-1, -1, 1};
  ShardingRule rule = reduction_rule(call, Kind::kSum, arguments, 1);
  std::vector<int> reduced;
  std::int64_t count = 1;
  for (std::size_t i = 0; i < rule.factors.size(); ++i) {
    if (!rule.factors[i].reduction) {
      continue;
    }
    reduced.push_back(static_cast<int>(i));
    count *= rule.factors[i].size;
  }
  if (call.tensor(0).itemsize > 2) {
    rule.local_call = {by_dim ? "aten::sum.dim_IntList" : "aten::sum", call.args,
                       1.0 / static_cast<double>(count), reduced};
    return rule;
  }
  for (int factor : reduced) {
    rule.factors[static_cast<std::size_t>(factor)].reduction = ReduceOp::kAvg;
    rule.factors[static_cast<std::size_t>(factor)].allow_uneven = false;
  }
  return rule;
}

/// Returns the rule of a p-norm. Reduced dimensions can be sharded only for norms without a root (p
/// = 0, 1, infinity); src/dtensor/lowerings/ has the other norms.
std::optional<ShardingRule> norm_rule(const OpCall& call, const Arguments& arguments) {
  const double order = call.is_none(1) ? 2.0 : call.number(1);
  Kind kind = Kind::kUnsharded;
  if (order == 0 || order == 1) {
    kind = Kind::kCount;  // order 0 counts nonzeros; order 1 sums absolute values
  }
  if (std::isinf(order)) {
    kind = order > 0 ? Kind::kMax : Kind::kMin;
  }
  ShardingRule rule = reduction_rule(call, kind, arguments, 1);
  // A Partial input is not allowed: the norm of a sum is not a sum of the terms' norms.
  rule.linear.clear();
  return rule;
}

RuleFunction::Body norm(Arguments arguments) {
  return [=](const OpCall& call) { return norm_rule(call, arguments); };
}

}  // namespace

Table reduction_table() {
  using enum Kind;
  const Arguments all, all_cast{-1, -1, 1}, dims{1, 2, 3};
  return {"reduction",
          {
              {"sum", reduction(kSum, all_cast)},
              {"sum{.dim_IntList,.IntList_out}", reduction(kSum, dims)},
              {"mean mean.dim", mean_rule},
              {"prod", reduction(kProduct, all_cast)},
              {"prod{.dim_int,.int_out}", reduction(kProduct, dims)},
              {"max{,.unary_out}", reduction(kMax, all)},
              {"min{,.unary_out}", reduction(kMin, all)},
              {"amax{,.out}", reduction(kMax, {1, 2})},
              {"amin{,.out}", reduction(kMin, {1, 2})},
              {"any{,.all_out}", reduction(kAny, all)},
              {"any{.dim,.out}", reduction(kAny, {1, 2})},
              {"all{,.all_out}", reduction(kAll, all)},
              {"all{.dim,.out}", reduction(kAll, {1, 2})},
              {"count_nonzero{,.dim_IntList}", reduction(kCount, {1})},
              {"linalg__powsum", reduction(kCount, {2, 3})},
              {"linalg_vector_norm{,.out}", norm({2, 3}), true},
              {"norm.{Scalar,ScalarOpt_dtype}", norm({}), true},
              {"norm{.ScalarOpt_dim,.ScalarOpt_dim_dtype,.out,.dtype_out}", norm({2, 3}), true},
              {"logsumexp{,.out}", reduction(kUnsharded, {1, 2})},
              {"{std,var}.correction", reduction(kUnsharded, {1, 3})},
              {"{std_mean,var_mean}.correction", reduction(kUnsharded, {1, 3}, 2)},
              {"max{.dim,.dim_max} min{.dim,.dim_min}", reduction(kUnsharded, {1, 2}, 2)},
              {"{argmax,argmin}{,.out}", reduction(kUnsharded, {1, 2})},
          }};
}

// The rules of softmax, cumsum, sort and roll. A result along the operator's dimension depends on
// the whole dimension, which is not sharded. Any other dimension can be sharded.

namespace {

/// The reductions for which a Partial first tensor gives a Partial result.
enum class Linearity {
  kNone,
  kLinear,  ///< a Partial sum or average as input gives a Partial result
  kMoves,   ///< every Partial input gives a Partial result: elements only move
};

struct Along {
  int dim = 1;  ///< index of the argument that lists dimensions; None: all dimensions
  std::size_t outputs = 1;
  Linearity linearity = Linearity::kNone;
};

/// Returns the rule of an operator whose tensors have one common shape. The dimensions in argument
/// `along.dim` are not sharded; all others may be sharded.
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
      if (meta_of(call, tensor).sizes != sizes) {
        return std::nullopt;
      }
      input_of(rule, tensor) = factors;
    }
    rule.outputs.assign(along.outputs, factors);
    if (along.linearity == Linearity::kLinear) {
      add_linear(rule, {tensors[0]});
    } else if (along.linearity == Linearity::kMoves) {
      add_any_linear(rule, {tensors[0]});
    }
    return rule;
  };
}

/// The rule of tril and triu: the last two dimensions are not sharded.
std::optional<ShardingRule> triangle_rule(const OpCall& call) {
  UnaryRule unary(call);
  const TensorFactors factors = unary.input;
  if (factors.size() < 2) {
    return std::nullopt;
  }
  keep_unsharded(unary.rule, factors[factors.size() - 1]);
  keep_unsharded(unary.rule, factors[factors.size() - 2]);
  return std::move(unary).linear(factors);
}

/// The rule of cumsum(self, dim, dtype). A Partial self is not allowed if `dtype` casts self first.
std::optional<ShardingRule> cumsum_rule(const OpCall& call) {
  return along({.linearity = call.is_none(2) ? Linearity::kLinear : Linearity::kNone})(call);
}

/// The rule of topk(self, k, dim, ...). Dimension `dim` is not sharded.
std::optional<ShardingRule> topk_rule(const OpCall& call) {
  const int ndim = call.tensor(0).ndim();
  ShardingRule rule = unchanged(call);
  if (ndim > 0) {
    const auto dim = static_cast<std::size_t>(wrap_dim(call, call.integer_or(2, -1), ndim));
    rule.outputs[0] = part_along(rule, rule.outputs[0], dim, call.integer(1));
  }
  rule.outputs.push_back(rule.outputs[0]);
  return rule;
}

}  // namespace

Table scan_table() {
  return {"along a dimension",
          {
              {"_softmax _log_softmax _safe_softmax", along({})},
              {"{_softmax,_log_softmax}_backward_data",
               along({.dim = 2, .linearity = Linearity::kLinear})},
              {"cumsum{,_,.out}", cumsum_rule},
              {"cumprod{,_,.out}", along({})},
              {"sort{,.values}", along({.outputs = 2})},
              {"sort{.stable,.values_stable}", along({.dim = 2, .outputs = 2})},
              {"argsort", along({})},
              {"argsort.stable", along({.dim = 2})},
              {"topk{,.values}", topk_rule},
              {"flip", along({.linearity = Linearity::kMoves})},
              {"roll", along({.dim = 2, .linearity = Linearity::kMoves})},
              {"{tril,triu}{,_,.out}", triangle_rule},
          }};
}

// The rules of losses. Samples can be sharded; classes are not sharded.

namespace {

/// The values of the argument `reduction` of losses, as in at::Reduction.
enum Reduction { kNone = 0, kMean = 1, kSum = 2 };

/// The factors (einsum index letters) of nll_loss: input (N, C, ...) or (C), target (N, ...) or
/// 0-d, and the weight of each class, (C).
struct NllFactors {
  TensorFactors input, target, weight;

  NllFactors(ShardingRule& rule, const Sizes& sizes) {
    const std::size_t classes = sizes.size() > 1 ? 1 : 0;
    for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
      input.push_back(
          {dim == classes ? add_unsharded(rule, sizes[dim]) : add_factor(rule, sizes[dim])});
      (dim == classes ? weight : target).push_back(input[dim]);
    }
  }
};

/// The rule of nll_loss_forward. Samples are not sharded for kMean, because no rank can compute the
/// total weight from its shard. A lowering handles sharded samples
/// (src/dtensor/lowerings/reductions.cpp).
std::optional<ShardingRule> nll_forward(const OpCall& call) {
  const Sizes& sizes = call.tensor(0).sizes;
  if (sizes.empty()) {
    return std::nullopt;
  }
  const std::int64_t reduction = call.integer(3);
  ShardingRule rule = start(call);
  const NllFactors factors(rule, sizes);
  if (call.tensor(1).sizes.size() != factors.target.size()) {
    return std::nullopt;
  }
  input_of(rule, call.tensor_index(0)) = factors.input;
  input_of(rule, call.tensor_index(1)) = factors.target;
  set_input(rule, call, 2, factors.weight);
  for (const Factors& dim : factors.target) {
    for (int factor : dim) {
      auto& properties = rule.factors[static_cast<std::size_t>(factor)];
      if (reduction == kMean) {
        properties.unsharded = true;
      } else {
        // The total weight and a scalar loss are sums over samples.
        properties.reduction = ReduceOp::kSum;
      }
    }
  }
  rule.outputs.push_back(reduction == kNone ? factors.target : TensorFactors{});
  rule.outputs.emplace_back();
  return rule;
}

/// The rule of nll_loss_backward(grad, self, target, weight, reduction, ignore_index, total
/// weight). Samples can be sharded, because the argument `total weight` includes all shards.
std::optional<ShardingRule> nll_backward(const OpCall& call) {
  const Sizes& sizes = call.tensor(1).sizes;
  if (sizes.empty()) {
    return std::nullopt;
  }
  ShardingRule rule = start(call);
  const NllFactors factors(rule, sizes);
  if (call.tensor(2).sizes.size() != factors.target.size()) {
    return std::nullopt;
  }
  // Without a reduction (kNone) the gradient of the loss has one element for each sample. With a
  // reduction this gradient is a scalar.
  if (call.tensor(0).ndim() > 0) {
    input_of(rule, call.tensor_index(0)) = factors.target;
  }
  input_of(rule, call.tensor_index(1)) = factors.input;
  input_of(rule, call.tensor_index(2)) = factors.target;
  set_input(rule, call, 3, factors.weight);
  // Only a mean, which is divided by the total weight, reads the values of the total weight.
  if (call.integer(4) != kMean) {
    rule.unread.push_back(call.tensor_index(6));
  }
  rule.outputs.push_back(factors.input);
  add_linear(rule, {call.tensor_index(0)});
  return rule;
}

/// The rule of an elementwise loss or its backward. A mean divides the sum of local sums by the
/// global number of elements. Half precision averages the means of equal shards.
std::optional<ShardingRule> loss_rule(const OpCall& call, std::size_t reduction_arg,
                                      bool is_backward) {
  ShardingRule rule = start(call);
  const auto elements = add_broadcast(rule, call, tensor_arguments(call));
  if (!elements) {
    return std::nullopt;
  }
  if (is_backward) {
    add_linear(rule, {call.tensor_index(0)});
  }
  const std::int64_t reduction = call.integer(reduction_arg);
  const bool averages = !is_backward && reduction == kMean && call.tensor(0).itemsize <= 2;
  if (reduction == kMean && !averages) {
    std::int64_t count = 1;
    ShardingRule::LocalCall local{call.op, call.args, 1.0, {}};
    for (const Factors& dim : *elements) {
      count *= size_of(rule, dim);
      local.when_split.insert(local.when_split.end(), dim.begin(), dim.end());
    }
    local.args[reduction_arg] = std::int64_t{kSum};
    local.scale = 1.0 / static_cast<double>(count);
    rule.local_call = local;
  }
  if (!is_backward && reduction != kNone) {
    for (const Factors& dim : *elements) {
      for (int factor : dim) {
        auto& properties = rule.factors[static_cast<std::size_t>(factor)];
        properties.reduction = averages ? ReduceOp::kAvg : ReduceOp::kSum;
        properties.allow_uneven = !averages;
      }
    }
    rule.outputs.emplace_back();
  } else {
    rule.outputs.push_back(*elements);
  }
  return rule;
}

RuleFunction::Body loss(std::size_t reduction_arg, bool is_backward = false) {
  return [=](const OpCall& call) { return loss_rule(call, reduction_arg, is_backward); };
}

}  // namespace

Table loss_table() {
  return {"loss",
          {
              {"nll_loss_forward nll_loss2d_forward", nll_forward},
              {"nll_loss_backward nll_loss2d_backward", nll_backward},
              {"mse_loss", loss(2), true},
              {"binary_cross_entropy_with_logits", loss(4), true},
              {"mse_loss_backward", loss(3, true), true},
          }};
}

}  // namespace tessera::rules
