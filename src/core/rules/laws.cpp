#include "laws.h"

#include <algorithm>
#include <cstddef>

#include "rule_builder.h"

namespace tessera::rules {
namespace {

void add_law(ShardingRule& rule, std::string_view law, const std::vector<int>& tensors) {
  std::vector<int> inputs;
  char kind = '+';
  for (char c : law) {
    if (c < '0' || c > '9') {
      kind = c;
    } else if (const auto ordinal = static_cast<std::size_t>(c - '0'); ordinal < tensors.size()) {
      inputs.push_back(tensors[ordinal]);
    }
  }
  switch (kind) {
    case '<':
      return add_linear(rule, inputs, {ReduceOp::kMax, ReduceOp::kMin});
    case '^':
      return add_linear(rule, inputs, {ReduceOp::kMax});
    case 'v':
      return add_linear(rule, inputs, {ReduceOp::kMin});
    case '~':
      return add_linear(rule, inputs, {ReduceOp::kAvg});
    case '*':
      return add_any_linear(rule, inputs);
    default:
      return add_linear(rule, inputs);
  }
}

}  // namespace

void add_laws(ShardingRule& rule, std::string_view laws, const std::vector<int>& tensors) {
  while (!laws.empty()) {
    const std::size_t end = std::min(laws.find(' '), laws.size());
    add_law(rule, laws.substr(0, end), tensors);
    laws.remove_prefix(std::min(end + 1, laws.size()));
  }
}

}  // namespace tessera::rules
