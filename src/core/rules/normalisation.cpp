// Layer, RMS, group and batch norm. What is normalised over stays whole, as its statistics are of
// all of it; batch norm along a sharded batch is a form instead (src/dtensor/forms/).
#include <optional>
#include <vector>

#include "rules/rule_builder.h"
#include "rules/rule_table.h"

namespace tessera::rules {
namespace {

/// The factors of a layer norm: unsharded over the last dimensions, which it normalises; over the
/// leading ones with reduction sum if `reduce`.
struct NormFactors {
  TensorFactors input;
  TensorFactors normalised;  ///< of weight and bias
  TensorFactors statistics;  ///< the leading factors, then size 1

  NormFactors(ShardingRule& rule, const Sizes& sizes, std::size_t normalised_dims, bool reduce) {
    for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
      const bool leading = dim + normalised_dims < sizes.size();
      const int factor = !leading ? add_unsharded(rule, sizes[dim])
                         : reduce ? add_reduced(rule, sizes[dim], ReduceOp::kSum)
                                  : add_factor(rule, sizes[dim]);
      input.push_back({factor});
      if (!leading) {
        normalised.push_back({factor});
      }
      statistics.push_back(leading ? Factors{factor} : Factors{});
    }
  }
};

/// Optional parameters that the call leaves out are passed over.
void set_input(ShardingRule& rule, const OpCall& call, std::size_t arg,
               const TensorFactors& factors) {
  if (call.has_tensor(arg)) {
    input_of(rule, call.tensor_index(arg)) = factors;
  }
}

/// norm(input, normalised shape, parameters...) -> result and statistics.
RuleFunction::Body norm_forward(const std::vector<std::size_t>& parameters,
                                std::size_t statistics) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const std::size_t dims = call.integers(1).size();
    if (dims > call.tensor(0).sizes.size()) {
      return std::nullopt;
    }
    ShardingRule rule = start(call);
    const NormFactors factors(rule, call.tensor(0).sizes, dims, false);
    set_input(rule, call, 0, factors.input);
    for (std::size_t arg : parameters) {
      set_input(rule, call, arg, factors.normalised);
    }
    rule.outputs.push_back(factors.input);
    rule.outputs.insert(rule.outputs.end(), statistics, factors.statistics);
    return rule;
  };
}

/// Its backward(grad, input, normalised shape, statistics..., parameters..., mask). Linear in the
/// gradient. Each shard of the leading dimensions adds its terms to the parameters' gradients.
RuleFunction::Body norm_backward(const std::vector<std::size_t>& statistics,
                                 const std::vector<std::size_t>& parameters) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const std::size_t dims = call.integers(2).size();
    if (dims > call.tensor(1).sizes.size()) {
      return std::nullopt;
    }
    ShardingRule rule = start(call);
    const NormFactors factors(rule, call.tensor(1).sizes, dims, true);
    set_input(rule, call, 0, factors.input);
    set_input(rule, call, 1, factors.input);
    for (std::size_t arg : statistics) {
      set_input(rule, call, arg, factors.statistics);
    }
    for (std::size_t arg : parameters) {
      set_input(rule, call, arg, factors.normalised);
    }
    rule.outputs.push_back(factors.input);
    rule.outputs.insert(rule.outputs.end(), parameters.size(), factors.normalised);
    add_linear(rule, {call.tensor_index(0)});
    return rule;
  };
}

/// native_group_norm(input (batch, channels, ...), weight, bias, N, C, HxW, groups, eps) -> result,
/// mean and rstd (batch, groups).
std::optional<ShardingRule> group_norm_rule(const OpCall& call) {
  if (call.tensor(0).ndim() < 2) {
    return std::nullopt;
  }
  ShardingRule rule = start(call);
  TensorFactors input = add_unsharded_factors(rule, call.tensor(0).sizes);
  input[0] = {add_factor(rule, call.tensor(0).size(0))};
  rule.factors.back().allow_empty = false;
  const TensorFactors statistics{input[0], {add_unsharded(rule, call.integer(6))}};
  set_input(rule, call, 0, input);
  set_input(rule, call, 1, {input[1]});
  set_input(rule, call, 2, {input[1]});
  rule.outputs = {input, statistics, statistics};
  // N, the size of the batch, is an argument: on each rank that of its part.
  rule.size_arguments.push_back({3, 0, 0});
  return rule;
}

/// Its backward(grad, input, mean, rstd, weight, N, C, HxW, groups, mask)
std::optional<ShardingRule> group_norm_backward_rule(const OpCall& call) {
  if (call.tensor(1).ndim() < 2) {
    return std::nullopt;
  }
  ShardingRule rule = start(call);
  TensorFactors input = add_unsharded_factors(rule, call.tensor(1).sizes);
  input[0] = {add_reduced(rule, call.tensor(1).size(0), ReduceOp::kSum)};
  rule.factors.back().allow_empty = false;
  const TensorFactors statistics{input[0], {}};
  set_input(rule, call, 0, input);
  set_input(rule, call, 1, input);
  set_input(rule, call, 2, statistics);
  set_input(rule, call, 3, statistics);
  set_input(rule, call, 4, {input[1]});
  rule.outputs = {input, {input[1]}, {input[1]}};
  rule.size_arguments.push_back({5, 0, 0});
  add_linear(rule, {call.tensor_index(0)});
  return rule;
}

/// Batch normalisation with the running statistics: pointwise. The statistics it returns are empty.
/// Given statistics make samples independent, so that every dimension may be sharded.
ShardingRule batch_norm_inference(const OpCall& call) {
  ShardingRule rule = start(call);
  const TensorFactors input = add_factors(rule, call.tensor(0).sizes);
  forbid_empty_shards(rule);
  set_input(rule, call, 0, input);
  for (std::size_t arg = 1; arg <= 4; ++arg) {
    set_input(rule, call, arg, {input[1]});
  }
  rule.outputs = {input, {}, {}};
  rule.groups = {group_of_inputs(call, {0})};
  return rule;
}

/// native_batch_norm(input, weight, bias, running mean, running variance, training, ...). In
/// training channels are independent and samples are not; the running statistics are written.
std::optional<ShardingRule> batch_norm_rule(const OpCall& call) {
  if (call.tensor(0).ndim() < 2) {
    return std::nullopt;
  }
  if (!call.boolean_or(5, false)) {
    return batch_norm_inference(call);
  }
  ShardingRule rule = start(call);
  TensorFactors input = add_unsharded_factors(rule, call.tensor(0).sizes);
  input[1] = {add_factor(rule, call.tensor(0).size(1))};
  rule.factors.back().allow_empty = false;
  const TensorFactors channels{input[1]};
  set_input(rule, call, 0, input);
  for (std::size_t arg = 1; arg <= 4; ++arg) {
    set_input(rule, call, arg, channels);
  }
  rule.outputs = {input, channels, channels};
  // They are not returned, so they are outputs behind those that are.
  for (std::size_t arg : {3, 4}) {
    if (!call.has_tensor(arg)) {
      continue;
    }
    rule.inplace.push_back({call.tensor_index(arg), static_cast<int>(rule.outputs.size())});
    rule.outputs.push_back(channels);
  }
  return rule;
}

/// native_batch_norm_backward(grad, input, weight, running mean, running variance, mean, inverse
/// deviation, training, ...). With the running statistics samples are independent, and each shard
/// adds its terms to the parameters' gradients.
std::optional<ShardingRule> batch_norm_backward_rule(const OpCall& call) {
  if (call.tensor(1).ndim() < 2) {
    return std::nullopt;
  }
  const bool training = call.boolean_or(7, false);
  ShardingRule rule = start(call);
  TensorFactors input;
  for (const std::int64_t size : call.tensor(1).sizes) {
    const bool whole = training && input.size() != 1;
    input.push_back({whole ? add_unsharded(rule, size) : add_reduced(rule, size, ReduceOp::kSum)});
  }
  forbid_empty_shards(rule);
  const TensorFactors channels{input[1]};
  set_input(rule, call, 0, input);
  set_input(rule, call, 1, input);
  for (std::size_t arg = 2; arg <= (training ? 6 : 4); ++arg) {
    set_input(rule, call, arg, channels);
  }
  rule.outputs = {input, channels, channels};
  add_linear(rule, {call.tensor_index(0)});
  return rule;
}

}  // namespace

Table normalisation_table() {
  return {"normalisation",
          {
              {"native_layer_norm", norm_forward({2, 3}, 2)},
              {"native_layer_norm_backward", norm_backward({3, 4}, {5, 6})},
              {"_fused_rms_norm", norm_forward({2}, 1)},
              {"_fused_rms_norm_backward", norm_backward({3}, {4})},
              {"native_group_norm", group_norm_rule},
              {"native_group_norm_backward", group_norm_backward_rule},
              {"native_batch_norm", batch_norm_rule},
              {"native_batch_norm_backward", batch_norm_backward_rule},
          }};
}

}  // namespace tessera::rules
