#include <algorithm>
#include <array>
#include <deque>
#include <string>
#include <unordered_map>
#include <utility>

#include "rules/rule_builder.h"
#include "rules/rule_table.h"
#include "tessera/core/error.h"
#include "user_rules.h"

namespace tessera {
namespace {

/// Appends the expansions of a name with braces: "a{,_}" gives "a" and "a_".
void expand_braces(std::string name, std::vector<std::string>& result) {
  const std::size_t open = name.find('{');
  if (open == std::string::npos) {
    result.push_back(std::move(name));
    return;
  }
  const std::size_t close = name.find('}', open);
  TESSERA_CHECK(close != std::string::npos, "rule table: unbalanced brace in ", name);
  for (std::size_t at = open + 1; at <= close;) {
    const std::size_t end = std::min(name.find(',', at), close);
    expand_braces(name.substr(0, open) + name.substr(at, end - at) + name.substr(close + 1),
                  result);
    at = end + 1;
  }
}

std::vector<std::string> expand_names(std::string_view names) {
  std::vector<std::string> result;
  while (!names.empty()) {
    const std::size_t end = std::min(names.find(' '), names.size());
    if (end > 0) expand_braces("aten::" + std::string(names.substr(0, end)), result);
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return result;
}

struct Registry {
  std::deque<std::string> names;
  std::unordered_map<std::string_view, RuleFunction::Entry> entries;
  std::vector<RuleFamily> families;

  Registry() {
    for (const auto& table :
         {rules::pointwise_table, rules::matmul_table, rules::reduction_table, rules::scan_table,
          rules::view_table, rules::view_gradient_table, rules::creation_table,
          rules::joining_table, rules::indexing_table, rules::embedding_table,
          rules::normalisation_table, rules::loss_table, rules::convolution_table,
          rules::batched_table, rules::attention_table, rules::foreach_table,
          rules::optimizer_table, rules::random_table}) {
      add(table());
    }
  }

  void add(const rules::Table& table) {
    RuleFamily& family = families.emplace_back(RuleFamily{table.family, {}});
    for (const rules::Row& row : table.rows) {
      for (std::string& name : expand_names(row.names)) {
        const std::string_view op = names.emplace_back(std::move(name));
        TESSERA_CHECK(entries.emplace(op, RuleFunction::Entry{row.body, row.reads_numbers}).second,
                      "rule table: two rules for ", op);
        family.operators.push_back(op);
      }
    }
    std::sort(family.operators.begin(), family.operators.end());
  }
};

const Registry& registry() {
  static const Registry instance;
  return instance;
}

bool same_sizes(const ShardingRule& rule, const rules::TensorFactors& factors,
                const rules::Sizes& sizes) {
  return std::equal(factors.begin(), factors.end(), sizes.begin(), sizes.end(),
                    [&](const auto& dim, auto size) { return rules::size_of(rule, dim) == size; });
}

/// In-place operators that change a tensor's shape, and leave its elements where they are.
bool changes_shape(std::string_view op) {
  constexpr std::array<std::string_view, 4> kNames{"t_", "transpose_", "squeeze_", "unsqueeze_"};
  return std::find(kNames.begin(), kNames.end(), rules::base_name(op)) != kNames.end();
}

/// An in-place operator: its result is its first tensor.
std::optional<ShardingRule> apply_inplace(const RuleFunction::Body& body, const OpCall& call) {
  std::optional<ShardingRule> rule = body(call);
  if (changes_shape(call.op)) return rule;
  if (!rule || !rule->inplace.empty() || rule->outputs.size() != 1) return rule;
  const int self = call.tensor_index(0);
  if (!same_sizes(*rule, rule->outputs[0], rules::meta_of(call, self).sizes)) return std::nullopt;
  rule->inplace.push_back({self, 0});
  return rule;
}

/// An out= overload: the last arguments take the results, and nothing of them is read.
std::optional<ShardingRule> apply_out(const RuleFunction::Body& body, const OpCall& call) {
  const std::size_t count = rules::out_count(call.op);
  if (call.args.size() < count) return std::nullopt;
  const std::size_t first = call.args.size() - count;
  OpCall functional = call;
  functional.args.resize(first);
  std::optional<ShardingRule> rule = body(functional);
  if (!rule || rule->outputs.size() != count || rule->local_call) return std::nullopt;
  for (std::size_t i = 0; i < count; ++i) {
    if (!call.has_tensor(first + i)) return std::nullopt;
    const int out = call.tensor_index(first + i);
    if (!same_sizes(*rule, rule->outputs[i], rules::meta_of(call, out).sizes)) return std::nullopt;
    rules::input_of(*rule, out) = rule->outputs[i];
    rule->unread.push_back(out);
    rule->inplace.push_back({out, static_cast<int>(i)});
  }
  return rule;
}

}  // namespace

std::optional<ShardingRule> RuleFunction::operator()(const OpCall& call) const {
  if (rules::out_count(call.op) > 0) return apply_out(entry_->body, call);
  if (rules::is_inplace(call.op)) return apply_inplace(entry_->body, call);
  return entry_->body(call);
}

RuleFunction find_rule(std::string_view op) {
  if (const auto* own = detail::look_up_user_rule(op)) return RuleFunction(own);
  const auto found = registry().entries.find(op);
  return found == registry().entries.end() ? nullptr : RuleFunction(&found->second);
}

std::vector<RuleFamily> rule_families() {
  return registry().families;
}

std::vector<std::string_view> ruled_operators() {
  std::vector<std::string_view> result;
  for (const auto& [op, entry] : registry().entries) result.push_back(op);
  std::sort(result.begin(), result.end());
  return result;
}

}  // namespace tessera
