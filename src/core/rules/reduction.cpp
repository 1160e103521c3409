// Reductions. A reduced dimension may be sharded if the shards' results can be reduced in turn:
// then the result is partial, and nothing is sent until its value is needed.
#include <cmath>
#include <optional>
#include <vector>

#include "rules/rule_builder.h"
#include "rules/rule_table.h"

namespace tessera::rules {
namespace {

/// Which arguments of a reduction say what; -1: it has no such argument.
struct Arguments {
  int dim = -1;  ///< a dimension, a list, or None for all; -1: all
  int keepdim = -1;
  int dtype = -1;
};

/// The kind of a reduction. kNanSum: a sum, but not linear in its input (absolute values, counts).
/// kUnsharded: one that cannot be made of the shards' results; reduced dimensions are not sharded.
enum class Kind { kSum, kNanSum, kProduct, kMax, kMin, kAny, kAll, kUnsharded };

/// For bools, "any" is a maximum and "all" a minimum.
std::optional<ReduceOp> reduction_of(Kind kind) {
  switch (kind) {
    case Kind::kSum:
    case Kind::kNanSum:
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
  if (arguments.dim < 0) {
    return std::vector<bool>(static_cast<std::size_t>(ndim), true);
  }
  return named_dims(call, static_cast<std::size_t>(arguments.dim), ndim);
}

/// A reduced dimension that is kept has size 1: no factor.
bool keeps_dims(const OpCall& call, const Arguments& arguments) {
  return arguments.keepdim >= 0 &&
         call.boolean_or(static_cast<std::size_t>(arguments.keepdim), false);
}

/// A reduced dimension's factor. The maximum of nothing is an error; other reductions have a value.
int add_reduced_dim(ShardingRule& rule, std::int64_t size, Kind kind) {
  const std::optional<ReduceOp> op = reduction_of(kind);
  if (!op) {
    return add_unsharded(rule, size);
  }
  const int factor = add_reduced(rule, size, *op);
  rule.factors.back().allow_empty = kind != Kind::kMax && kind != Kind::kMin;
  return factor;
}

/// Which partial inputs the reduction keeps partial.
void add_linearity(ShardingRule& rule, Kind kind, int self) {
  if (kind == Kind::kSum) {
    add_linear(rule, {self});
  } else if (kind == Kind::kProduct || kind == Kind::kMax || kind == Kind::kMin) {
    add_linear(rule, {self}, {*reduction_of(kind)});
  }
}

/// The reduction of the first tensor. A dtype argument casts before the reduction, which is then
/// not linear: terms would be rounded one by one.
ShardingRule reduction_rule(const OpCall& call, Kind kind, const Arguments& arguments,
                            std::size_t outputs) {
  const int self = call.tensor_index(0);
  const Sizes& sizes = meta_of(call, self).sizes;
  const std::vector<bool> reduced = reduced_dims(call, arguments, meta_of(call, self).ndim());
  const bool keepdim = keeps_dims(call, arguments);
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

/// any.dims and all.dims: an empty list reduces nothing, unlike elsewhere.
RuleFunction::Body reduction_of_dims(Kind kind) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    if (!call.is_none(1) && call.integers(1).empty()) {
      return std::nullopt;
    }
    return reduction_rule(call, kind, {1, 2}, 1);
  };
}

/// A mean is the sum of the shards' sums, divided by the global count. In half precision the sum
/// could overflow: there it is the average of the shards' means, and the shards must have equal
/// sizes.
std::optional<ShardingRule> mean_rule(const OpCall& call) {
  // The two overloads have their dtype at different positions.
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
  // fp32 and wider: a sum of the shards has room.
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

/// A p-norm is a reduction only where it needs no root. (The others take forms: src/dtensor/forms.)
std::optional<ShardingRule> norm_rule(const OpCall& call, const Arguments& arguments) {
  const double order = call.is_none(1) ? 2.0 : call.number(1);
  Kind kind = Kind::kUnsharded;
  if (order == 0 || order == 1) {
    kind = Kind::kNanSum;  // of absolute values, or a count
  }
  // The largest or the smallest absolute value.
  if (std::isinf(order)) {
    kind = order > 0 ? Kind::kMax : Kind::kMin;
  }
  ShardingRule rule = reduction_rule(call, kind, arguments, 1);
  // Absolute values are taken first: no norm of a pending sum is the norm of the sum.
  rule.linear.clear();
  return rule;
}

RuleFunction::Body norm(Arguments arguments) {
  return [=](const OpCall& call) { return norm_rule(call, arguments); };
}

/// histc(self, bins, min, max). Equal bounds stand for those of the data, which no shard knows.
std::optional<ShardingRule> histogram_rule(const OpCall& call) {
  if (call.number(2) == call.number(3)) {
    return std::nullopt;
  }
  ShardingRule rule = reduction_rule(call, Kind::kNanSum, {}, 1);
  rule.outputs[0] = {{add_unsharded(rule, call.integer(1))}};
  return rule;
}

}  // namespace

Table reduction_table() {
  using enum Kind;
  const Arguments all, all_cast{-1, -1, 1}, dims{1, 2, 3};
  return {
      "reduction",
      {
          {"sum", reduction(kSum, all_cast)},
          {"sum{.dim_IntList,.IntList_out}", reduction(kSum, dims)},
          {"nansum{,.out}", reduction(kNanSum, dims)},
          {"mean mean.dim", mean_rule},
          {"prod", reduction(kProduct, all_cast)},
          {"prod{.dim_int,.int_out}", reduction(kProduct, dims)},
          {"max{,.unary_out}", reduction(kMax, all)},
          {"min{,.unary_out}", reduction(kMin, all)},
          {"amax{,.out}", reduction(kMax, {1, 2})},
          {"amin{,.out}", reduction(kMin, {1, 2})},
          {"any{,.all_out}", reduction(kAny, all)},
          {"any{.dim,.out}", reduction(kAny, {1, 2})},
          {"any.dims", reduction_of_dims(kAny)},
          {"all{,.all_out}", reduction(kAll, all)},
          {"all{.dim,.out}", reduction(kAll, {1, 2})},
          {"all.dims", reduction_of_dims(kAll)},
          {"count_nonzero", reduction(kNanSum, {1})},
          {"count_nonzero.dim_IntList", reduction(kNanSum, {1})},
          {"histc{,.out}", histogram_rule, true},
          {"linalg__powsum", reduction(kNanSum, {2, 3})},
          {"linalg_vector_norm{,.out}", norm({2, 3}), true},
          {"norm.Scalar", norm({}), true},
          {"norm.ScalarOpt_dtype", norm({}), true},
          {"norm{.ScalarOpt_dim,.ScalarOpt_dim_dtype,.out,.dtype_out}", norm({2, 3}), true},
          {"logsumexp{,.out}", reduction(kUnsharded, {1, 2})},
          {"{std,var}.correction", reduction(kUnsharded, {1, 3})},
          {"{std_mean,var_mean}.correction", reduction(kUnsharded, {1, 3}, 2)},
          {"max{.dim,.dim_max} min{.dim,.dim_min}", reduction(kUnsharded, {1, 2}, 2)},
          {"{argmax,argmin}{,.out}", reduction(kUnsharded, {1, 2})},
          {"aminmax", reduction(kUnsharded, {1, 2}, 2)},
          {"median nanmedian", reduction(kUnsharded, all)},
          {"{median,nanmedian}{.dim,.dim_values} mode{,.values}", reduction(kUnsharded, {1, 2}, 2)},
          {"kthvalue{,.values}", reduction(kUnsharded, {2, 3}, 2)},
      }};
}

}  // namespace tessera::rules
