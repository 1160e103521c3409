// Operators that make a tensor beside another one. They take its layout, so that what is made fits
// the tensor that it will be used with, and read no values: nothing is ever moved for them.
#include <optional>
#include <vector>

#include "rules/rule_builder.h"
#include "rules/rule_table.h"

namespace tessera::rules {
namespace {

// Constants

/// zeros_like and similar ones: laid out as the tensor, whose values are not read.
std::optional<ShardingRule> like_rule(const OpCall& call) {
  ShardingRule rule = unchanged(call);
  rule.unread.push_back(call.tensor_index(0));
  return rule;
}

/// new_zeros(self, size, ...): a dimension of the tensor's size is laid out as the tensor's.
/// Formulas of gradients make zeros so and then write the gradient into them. With another number
/// of dimensions the result is replicated.
std::optional<ShardingRule> new_rule(const OpCall& call) {
  const Sizes sizes = call.integers(1);
  const Sizes& own = call.tensor(0).sizes;
  const int self = call.tensor_index(0);
  ShardingRule rule = start(call);
  TensorFactors result;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    // With the same number of dimensions only: otherwise which one corresponds would be a guess.
    const bool follows = sizes.size() == own.size() && sizes[dim] == own[dim];
    result.push_back({follows ? add_factor(rule, sizes[dim]) : add_unsharded(rule, sizes[dim])});
    if (follows) {
      input_of(rule, self)[dim] = result[dim];
    }
  }
  rule.outputs.push_back(result);
  rule.unread.push_back(self);
  // Each rank makes its own part.
  rule.size_arguments.push_back({1, 0});
  return rule;
}

/// The strides that the caller passes are global. Locally the result is contiguous.
std::optional<ShardingRule> new_strided_rule(const OpCall& call) {
  std::optional<ShardingRule> rule = new_rule(call);
  ShardingRule::LocalCall local{"aten::new_empty", call.args};
  // The strides, argument 2: contiguous is what new_empty gives.
  local.args.erase(local.args.begin() + 2);
  rule->local_call = local;
  return rule;
}

// Random numbers

/// A pointwise operator that draws random numbers: laid out as its tensors, which must not be
/// partial. `reads`: whether it reads their values. dtensor runs these by the global element
/// (src/dtensor/random/): run locally, every shard would draw the same numbers.
RuleFunction::Body draw(std::size_t outputs, bool reads) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const std::vector<int> tensors = tensor_arguments(call);
    ShardingRule rule = start(call);
    const std::optional<TensorFactors> result = add_broadcast(rule, call, tensors);
    if (!result) {
      return std::nullopt;
    }
    rule.outputs.assign(outputs, *result);
    if (!reads) {
      rule.unread.push_back(tensors[0]);
    }
    rule.random = true;
    return rule;
  };
}

}  // namespace

Table creation_table() {
  return {"creation",
          {
              {"{empty,zeros,ones,full}_like", like_rule},
              {"new_{empty,zeros,ones,full}", new_rule},
              {"new_empty_strided", new_strided_rule},
          }};
}

Table random_table() {
  return {
      "random",
      {
          {"native_dropout", draw(2, true)},
          {"normal_functional {rand,randn}_like bernoulli_.float normal_ uniform_", draw(1, false)},
      }};
}

}  // namespace tessera::rules
