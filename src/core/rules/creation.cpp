#include <optional>
#include <string_view>
#include <vector>

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

/// new_zeros(self, size, ...): laid out as the tensor if it has its sizes, else replicated.
std::optional<ShardingRule> new_rule(const OpCall& call) {
  const Sizes sizes = call.integers(1);
  if (sizes == call.tensor(0).sizes) {
    std::optional<ShardingRule> rule = like_rule(call);
    rule->size_arguments.push_back({1, 0});
    return rule;
  }
  ShardingRule rule = start(call);
  rule.outputs.push_back(add_wholes(rule, sizes));
  rule.unread.push_back(call.tensor_index(0));
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
