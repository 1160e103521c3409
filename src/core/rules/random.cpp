#include <optional>
#include <vector>

#include "rule_builder.h"
#include "rule_table.h"

namespace tessera::rules {
namespace {

/// Pointwise, and drawing random numbers: laid out as its tensors, partial in none.
RuleFunction::Body draw(std::size_t outputs, bool reads) {
  return [=](const OpCall& call) -> std::optional<ShardingRule> {
    const std::vector<int> tensors = tensor_arguments(call);
    ShardingRule rule = start(call);
    const std::optional<TensorFactors> result = add_broadcast(rule, call, tensors);
    if (!result) return std::nullopt;
    rule.outputs.assign(outputs, *result);
    if (!reads) rule.unread.push_back(tensors[0]);
    rule.random = true;
    return rule;
  };
}

}  // namespace

Table random_table() {
  return {
      "random",
      {
          {"native_dropout", draw(2, true)},
          {"normal_functional {rand,randn}_like bernoulli_.float normal_ uniform_", draw(1, false)},
      }};
}

}  // namespace tessera::rules
