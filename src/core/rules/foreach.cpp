// List operators, which run one kernel for many tensors: optimizers and gradient clipping call
// them. Each position of the lists is decided by itself, as parameters of one list may be laid out
// in any way.
#include <algorithm>
#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

#include "rules/rule_builder.h"
#include "rules/rule_table.h"

namespace tessera::rules {
namespace {

/// The list arguments of a call; each is as long as the first one, or empty.
using Lists = std::vector<std::vector<TensorRef>>;

/// An empty list stands for an optional one that the call leaves out.
std::optional<Lists> list_arguments(const OpCall& call) {
  Lists lists;
  for (const Argument& arg : call.args) {
    if (const auto* list = std::get_if<std::vector<TensorRef>>(&arg)) {
      lists.push_back(*list);
    }
  }
  const bool fit = !lists.empty() && std::all_of(lists.begin(), lists.end(), [&](const auto& list) {
    return list.empty() || list.size() == lists[0].size();
  });
  return fit ? std::optional(lists) : std::nullopt;
}

/// The tensors at one position of the lists.
/// In the order of the lists, to which the digits of linear terms refer.
std::vector<int> position(const Lists& lists, std::size_t at) {
  std::vector<int> result;
  for (const auto& list : lists) {
    if (at < list.size()) {
      result.push_back(list[at].index);
    }
  }
  return result;
}

/// A pointwise operator on each position of its lists; each position is a separate group. A single
/// tensor among the arguments belongs to all positions, so it is replicated. An in-place operator
/// writes the first list. `linear`: see add_linear_terms.
std::optional<ShardingRule> foreach_rule(const OpCall& call, std::string_view linear, bool reads) {
  const std::optional<Lists> lists = list_arguments(call);
  if (!lists) {
    return std::nullopt;
  }
  ShardingRule rule = start(call);
  for (std::size_t at = 0; at < lists->front().size(); ++at) {
    const std::vector<int> tensors = position(*lists, at);
    const std::optional<TensorFactors> result = add_broadcast(rule, call, tensors);
    if (!result) {
      return std::nullopt;
    }
    const auto output = static_cast<int>(at);
    rule.outputs.push_back(*result);
    rule.groups.push_back({tensors, {output}});
    add_linear_terms(rule, linear, tensors);
    // The registry adds this for single results only.
    if (is_inplace(call.op)) {
      rule.inplace.push_back({tensors[0], output});
    }
    if (!reads) {
      rule.unread.push_back(tensors[0]);
    }
  }
  return rule;
}

RuleFunction::Body foreach (std::string_view linear = "", bool reads = true) {
  return [=](const OpCall& call) { return foreach_rule(call, linear, reads); };
}

/// One scalar per tensor. nullopt from `reduction_of`: the tensors stay unsharded. The results are
/// 0-d: partial where the tensor is sharded, so that nothing is sent until a result is read.
RuleFunction::Body foreach_reduction(std::optional<ReduceOp> (*reduction_of)(const OpCall&)) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const std::optional<ReduceOp> reduction = reduction_of(call);
    ShardingRule rule = start(call);
    for (TensorRef ref : call.tensor_list(0)) {
      TensorFactors& input = input_of(rule, ref.index);
      for (std::size_t dim = 0; dim < input.size(); ++dim) {
        const std::int64_t size = meta_of(call, ref.index).sizes[dim];
        input[dim] = {reduction ? add_reduced(rule, size, *reduction) : add_unsharded(rule, size)};
        // The maximum of nothing throws; a sum of nothing is 0.
        rule.factors.back().allow_empty = reduction == ReduceOp::kSum;
      }
      rule.groups.push_back({{ref.index}, {static_cast<int>(rule.outputs.size())}});
      rule.outputs.emplace_back();
    }
    return rule;
  };
}

/// A norm is a reduction only where it needs no root. Others stay unsharded here; optim's norms
/// call this operator on local tensors.
std::optional<ReduceOp> norm_reduction(const OpCall& call) {
  const double order = call.is_none(1) ? 2.0 : call.number(1);
  if (order == 0 || order == 1) {
    return ReduceOp::kSum;
  }
  if (order > 1e308) {  // infinity
    return ReduceOp::kMax;
  }
  return std::nullopt;
}

std::optional<ReduceOp> sum_reduction(const OpCall&) {
  return ReduceOp::kSum;
}
std::optional<ReduceOp> max_reduction(const OpCall&) {
  return ReduceOp::kMax;
}

/// A fused optimizer(parameters, gradients, state..., steps, ...). The tensors at one position of
/// the first `lists` lists have one layout; the steps behind them are replicated. All but the
/// gradients are written; the gradients are too if they are to be unscaled (argument `grad_scale`).
RuleFunction::Body fused(std::size_t lists, std::size_t grad_scale) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    Lists zipped;
    for (std::size_t arg = 0; arg < lists; ++arg) {
      zipped.push_back(call.tensor_list(arg));
    }
    const bool unscales = call.has_tensor(grad_scale);
    ShardingRule rule = start(call);
    for (std::size_t at = 0; at < zipped[0].size(); ++at) {
      const std::vector<int> tensors = position(zipped, at);
      const std::optional<TensorFactors> factors = add_broadcast(rule, call, tensors);
      if (!factors) {
        return std::nullopt;
      }
      ShardingRule::TensorGroup group{tensors, {}};
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        // The gradients, at list 1.
        if (i == 1 && !unscales) {
          continue;
        }
        const auto output = static_cast<int>(rule.outputs.size());
        rule.outputs.push_back(*factors);
        rule.inplace.push_back({tensors[i], output});
        group.outputs.push_back(output);
      }
      rule.groups.push_back(group);
    }
    return rule;
  };
}

}  // namespace

/// The terms are those of the operator in pointwise.cpp, for the lists instead of the tensors.
Table foreach_table() {
  return {
      "foreach",
      {
          {"_foreach_{add,add_,sub,sub_}.List", foreach ("01")},
          {"_foreach_{add,add_,sub,sub_}.{Scalar,ScalarList}", foreach ("0~ 0<")},
          {"_foreach_{add,add_}.Tensor", foreach ("0~ 0<")},
          {"_foreach_{mul,mul_}.List", foreach ("0 1")},
          {"_foreach_{mul,mul_,div,div_}.{Scalar,ScalarList,Tensor}", foreach ("0")},
          {"_foreach_{div,div_}.List", foreach ("0")},
          {"_foreach_neg{,_}", foreach ("0")},
          {"_foreach_{lerp,lerp_}.{Scalar,ScalarList,List}", foreach ("01")},
          {"_foreach_{addcmul,addcmul_}.{Scalar,ScalarList,Tensor}", foreach ("01 02")},
          {"_foreach_{addcdiv,addcdiv_}.{Scalar,ScalarList,Tensor}", foreach ("01")},
          {"_foreach_{maximum,maximum_,clamp_min,clamp_min_}.List", foreach ("01^")},
          {"_foreach_{minimum,minimum_,clamp_max,clamp_max_}.List", foreach ("01v")},
          {"_foreach_{maximum,minimum,clamp_min,clamp_max}{,_}.{Scalar,ScalarList}",
           foreach ("0<")},
          {"_foreach_{exp,expm1,sigmoid,tanh,erf,atan,sinh,ceil,floor,round,trunc}{,_}",
           foreach ("0<")},
          {"_foreach_{abs,acos,asin,cos,cosh,erfc,frac,lgamma,log,log10,log1p,log2,reciprocal,"
           "rsqrt}"
           "{,_}",
           foreach ()},
          {"_foreach_{sign,sin,sqrt,tan}{,_}", foreach ()},
          {"_foreach_{pow,pow_}.{List,Scalar,ScalarList} _foreach_pow.ScalarAndTensor", foreach ()},
          {"_foreach_zero_", foreach ("0*", false)},
          {"_foreach_copy_", foreach ("1*", false)},
          {"_foreach_norm.Scalar", foreach_reduction(norm_reduction), true},
          {"_foreach_powsum.Scalar", foreach_reduction(sum_reduction)},
          {"_foreach_max", foreach_reduction(max_reduction)},
      }};
}

Table optimizer_table() {
  return {"fused optimizers",
          {
              {"_fused_{adam,adamw}_{,.tensor_lr}", fused(5, 13)},
              {"_fused_sgd_{,.tensor_lr}", fused(3, 10)},
          }};
}

}  // namespace tessera::rules
