#include <optional>

#include "rule_builder.h"
#include "rule_table.h"

namespace tessera::rules {
namespace {

/// zeros_like and its like: laid out as the tensor, whose values are not read.
std::optional<ShardingRule> like_rule(const OpCall& call) {
  ShardingRule rule = start(call);
  const int self = call.tensor_index(0);
  input_of(rule, self) = add_factors(rule, call.tensor(0).sizes);
  rule.outputs.push_back(input_of(rule, self));
  rule.unread.push_back(self);
  return rule;
}

/// new_zeros(self, size, ...): of as many dimensions, laid out as the tensor along those of its
/// sizes, as a gradient is wanted that is then written into; else replicated.
std::optional<ShardingRule> new_rule(const OpCall& call) {
  const Sizes sizes = call.integers(1);
  const Sizes& own = call.tensor(0).sizes;
  const int self = call.tensor_index(0);
  ShardingRule rule = start(call);
  TensorFactors result;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    const bool follows = sizes.size() == own.size() && sizes[dim] == own[dim];
    result.push_back({follows ? add_factor(rule, sizes[dim]) : add_whole(rule, sizes[dim])});
    if (follows) input_of(rule, self)[dim] = result[dim];
  }
  rule.outputs.push_back(result);
  rule.unread.push_back(self);
  rule.size_arguments.push_back({1, 0});
  return rule;
}

/// The strides are global ones: locally the result is contiguous.
std::optional<ShardingRule> new_strided_rule(const OpCall& call) {
  std::optional<ShardingRule> rule = new_rule(call);
  ShardingRule::LocalCall local{"aten::new_empty", call.args};
  local.args.erase(local.args.begin() + 2);
  rule->local_call = local;
  return rule;
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

}  // namespace tessera::rules
