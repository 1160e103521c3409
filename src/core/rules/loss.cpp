// Losses. Samples may be sharded, classes not (tensor_parallel has a loss for sharded logits). They
// need separate rules because of the mean: a mean of shards' means is wrong where shards differ in
// size.
#include <optional>

#include "rules/rule_builder.h"
#include "rules/rule_table.h"

namespace tessera::rules {
namespace {

/// The values of at::Reduction.
enum Reduction { kNone = 0, kMean = 1, kSum = 2 };

/// The factors of nll_loss: input (N, C, ...) or (C), target (N, ...) or 0-d.
struct NllFactors {
  TensorFactors input, target;

  NllFactors(ShardingRule& rule, const Sizes& sizes) {
    const std::size_t classes = sizes.size() > 1 ? 1 : 0;
    for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
      input.push_back(
          {dim == classes ? add_unsharded(rule, sizes[dim]) : add_factor(rule, sizes[dim])});
      if (dim != classes) {
        target.push_back(input[dim]);
      }
    }
  }
};

/// One weight for each class, so unsharded like the classes.
void set_class_weight(ShardingRule& rule, const OpCall& call, std::size_t arg,
                      const NllFactors& factors, std::size_t classes) {
  if (call.has_tensor(arg)) {
    input_of(rule, call.tensor_index(arg)) = {factors.input[classes]};
  }
}

/// nll_loss_forward(self, target, weight, reduction, ignore_index) -> loss, total weight. A sum is
/// the sum of the shards' sums. A mean divides by the total weight, which no shard knows: samples
/// stay unsharded. (Where they are sharded, a form is cheaper: src/dtensor/forms/losses.cpp.)
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
  set_class_weight(rule, call, 2, factors, sizes.size() > 1 ? 1 : 0);
  for (const Factors& dim : factors.target) {
    for (int factor : dim) {
      auto& properties = rule.factors[static_cast<std::size_t>(factor)];
      if (reduction == kMean) {
        properties.unsharded = true;
      } else {
        properties.reduction = ReduceOp::kSum;  // of the total weight, and of the loss if it is one
      }
    }
  }
  rule.outputs.push_back(reduction == kNone ? factors.target : TensorFactors{});
  rule.outputs.emplace_back();
  return rule;
}

/// nll_loss_backward(grad, self, target, weight, reduction, ignore_index, total weight). The total
/// weight is passed in and global, so samples are independent.
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
  // Without a reduction the gradient is one number a sample, with one it is a scalar.
  if (call.tensor(0).ndim() > 0) {
    input_of(rule, call.tensor_index(0)) = factors.target;
  }
  input_of(rule, call.tensor_index(1)) = factors.input;
  input_of(rule, call.tensor_index(2)) = factors.target;
  set_class_weight(rule, call, 3, factors, sizes.size() > 1 ? 1 : 0);
  // Only a mean divides by it.
  if (call.integer(4) != kMean) {
    rule.unread.push_back(call.tensor_index(6));
  }
  rule.outputs.push_back(factors.input);
  add_linear(rule, {call.tensor_index(0)});
  return rule;
}

/// A loss of pairs of elements, then a reduction. As in mean_rule (reduction.cpp), a mean runs as a
/// sum that is scaled by the global count; in half precision it is the average of the means of
/// equal shards. `reduces`: false for a backward, which has no reduction.
ShardingRule elementwise_loss(const OpCall& call, std::size_t reduction_arg,
                              const TensorFactors& elements, ShardingRule rule, bool reduces) {
  const std::int64_t reduction = call.integer(reduction_arg);
  const bool averages = reduces && reduction == kMean && call.tensor(0).itemsize <= 2;
  // The scale is the global count, which is known here; the local call sums what the rank has.
  if (reduction == kMean && !averages) {
    std::int64_t count = 1;
    ShardingRule::LocalCall local{call.op, call.args, 1.0, {}};
    for (const Factors& dim : elements) {
      count *= size_of(rule, dim);
      local.when_split.insert(local.when_split.end(), dim.begin(), dim.end());
    }
    local.args[reduction_arg] = std::int64_t{kSum};
    local.scale = 1.0 / static_cast<double>(count);
    rule.local_call = local;
  }
  if (reduces && reduction != kNone) {
    for (const Factors& dim : elements) {
      for (int factor : dim) {
        auto& properties = rule.factors[static_cast<std::size_t>(factor)];
        properties.reduction = averages ? ReduceOp::kAvg : ReduceOp::kSum;
        properties.allow_uneven = !averages;
      }
    }
    rule.outputs.emplace_back();
  } else {
    rule.outputs.push_back(elements);
  }
  return rule;
}

/// loss(self, target, ..., reduction, ...). Its backward takes the gradient first, a scalar or of
/// the shape of the elements, and is linear in it.
RuleFunction::Body loss(std::size_t reduction_arg, bool is_backward = false) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    ShardingRule rule = start(call);
    const auto elements = add_broadcast(rule, call, tensor_arguments(call));
    if (!elements) {
      return std::nullopt;
    }
    if (is_backward) {
      add_linear(rule, {call.tensor_index(0)});
    }
    return elementwise_loss(call, reduction_arg, *elements, std::move(rule), !is_backward);
  };
}

}  // namespace

Table loss_table() {
  return {
      "loss",
      {
          {"nll_loss_forward nll_loss2d_forward", nll_forward},
          {"nll_loss_backward nll_loss2d_backward", nll_backward},
          {"mse_loss smooth_l1_loss huber_loss soft_margin_loss", loss(2), true},
          {"binary_cross_entropy", loss(3), true},
          {"binary_cross_entropy_with_logits", loss(4), true},
          {"{mse_loss,smooth_l1_loss,huber_loss,soft_margin_loss}_backward", loss(3, true), true},
          {"binary_cross_entropy_backward", loss(4, true), true},
      }};
}

}  // namespace tessera::rules
