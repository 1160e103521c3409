// The registry of sharding rules: the tables in src/core/rules/, and rules that programs register.
// The registry adapts rules of functional operators to in-place and out= variants.
#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "rules/rule_table.h"
#include "tessera/core/detail/rule_functions.h"
#include "tessera/core/error.h"
#include "tessera/core/register_rule.h"
#include "tessera/core/sharding_rule.h"

namespace tessera {
namespace {

/// Appends to `result` all expansions of a name with braces: "a{,_}" gives "a" and "a_".
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

/// Returns the full names of the operators in `names`, a list separated by blanks. A name in the
/// list omits "aten::" and can contain braces.
std::vector<std::string> expand_names(std::string_view names) {
  std::vector<std::string> result;
  while (!names.empty()) {
    const std::size_t end = std::min(names.find(' '), names.size());
    if (end > 0) {
      expand_braces("aten::" + std::string(names.substr(0, end)), result);
    }
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return result;
}

/// The library's rules. The registry changes only before main(), so look-ups need no lock.
struct Registry {
  // `families` refers to operator names that are keys of `entries`. std::map never moves its keys.
  std::map<std::string, RuleFunction::Entry, std::less<>> entries;
  std::vector<RuleFamily> families;

  // The tables of rules are in the order of docs/operators/operators.md.
  Registry() {
    for (const auto& make_table :
         {rules::pointwise_table, rules::matmul_table, rules::reduction_table, rules::scan_table,
          rules::view_table, rules::view_gradient_table, rules::creation_table,
          rules::joining_table, rules::indexing_table, rules::embedding_table,
          rules::normalisation_table, rules::loss_table, rules::convolution_table,
          rules::attention_table, rules::random_table}) {
      const rules::Table table = make_table();
      families.push_back({table.family, {}});
      for (const rules::Row& row : table.rows) {
        for (const std::string& name : expand_names(row.names)) {
          add(name, {row.body, row.reads_numbers});
        }
      }
    }
    families.push_back({"of this library", {}});
  }

  void add(const std::string& name, RuleFunction::Entry entry) {
    const auto [at, is_new] = entries.emplace(name, std::move(entry));
    TESSERA_CHECK(is_new, "rule table: two rules for ", name);
    auto& operators = families.back().operators;
    operators.insert(std::ranges::lower_bound(operators, at->first), at->first);
  }
};

Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

/// Whether `sizes` equals the sizes of the result (dimensions with `factors`). libtorch would
/// resize or reject an output tensor of other sizes.
bool same_sizes(const ShardingRule& rule, const rules::TensorFactors& factors,
                const rules::Sizes& sizes) {
  return std::equal(factors.begin(), factors.end(), sizes.begin(), sizes.end(),
                    [&](const auto& dim, auto size) { return rules::size_of(rule, dim) == size; });
}

bool changes_shape(std::string_view op) {
  constexpr std::array<std::string_view, 4> kNames{"t_", "transpose_", "squeeze_", "unsqueeze_"};
  return std::find(kNames.begin(), kNames.end(), rules::base_name(op)) != kNames.end();
}

/// Returns the rule of an in-place operator. The entries of ShardingRule::inplace state which
/// tensors the operator writes. A rule without entries gets an entry for the first tensor.
std::optional<ShardingRule> apply_inplace(const RuleFunction::Body& body, const OpCall& call) {
  std::optional<ShardingRule> rule = body(call);
  if (changes_shape(call.op)) {
    return rule;
  }
  if (!rule || !rule->inplace.empty() || rule->outputs.size() != 1) {
    return rule;
  }
  const int self = call.tensor_index(0);
  if (!same_sizes(*rule, rule->outputs[0], rules::meta_of(call, self).sizes)) {
    return std::nullopt;
  }
  rule->inplace.push_back({self, 0});
  return rule;
}

/// Returns the rule of an out= overload, whose last arguments receive the results. The old values
/// of these tensors are not read.
std::optional<ShardingRule> apply_out(const RuleFunction::Body& body, const OpCall& call) {
  const std::size_t count = rules::out_count(call.op);
  if (call.args.size() < count) {
    return std::nullopt;
  }
  const std::size_t first = call.args.size() - count;
  // The out arguments are removed, because the functional operator's rule could broadcast them with
  // the inputs. OpCall::tensors still has the out tensors, so tensor indices remain valid.
  OpCall functional = call;
  functional.args.resize(first);
  std::optional<ShardingRule> rule = body(functional);
  if (!rule || rule->outputs.size() != count || rule->local_call) {
    return std::nullopt;
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (!call.has_tensor(first + i)) {
      return std::nullopt;
    }
    const int out = call.tensor_index(first + i);
    if (!same_sizes(*rule, rule->outputs[i], rules::meta_of(call, out).sizes)) {
      return std::nullopt;
    }
    rules::input_of(*rule, out) = rule->outputs[i];
    rule->unread.push_back(out);
    rule->inplace.push_back({out, static_cast<int>(i)});
  }
  return rule;
}

struct UserRules {
  std::mutex mutex;
  // Each RuleFunction points to an entry, and std::map keeps the addresses of its entries.
  std::map<std::string, RuleFunction::Entry, std::less<>> rules;
  // Operators whose rule was looked up. register_rule() throws for such operators, because cached
  // call plans may depend on the rule that was looked up.
  std::set<std::string, std::less<>> looked_up;
};

UserRules& user_rules() {
  // UserRules are never destroyed: operators can run while static objects are destroyed.
  static auto* instance = new UserRules;
  return *instance;
}

/// Returns the program's rule for `op`, or nullptr. A later register_rule() for `op` throws Error.
const RuleFunction::Entry* look_up_user_rule(std::string_view op) {
  auto& all = user_rules();
  const std::lock_guard lock(all.mutex);
  all.looked_up.emplace(op);
  const auto found = all.rules.find(op);
  return found == all.rules.end() ? nullptr : &found->second;
}

}  // namespace

void detail::add_library_rule(const std::string& op, RuleFunction::Body body, bool reads_numbers) {
  registry().add(op, {std::move(body), reads_numbers});
}

/// register_rule() throws Error after the first use of operator `op`, because cached call plans can
/// already depend on the old rule.
void register_rule(std::string op, RuleFunction::Body rule, bool reads_numbers) {
  TESSERA_CHECK(rule != nullptr, "register_rule of ", op, ": the rule is empty; pass a function");
  auto& all = user_rules();
  const std::lock_guard lock(all.mutex);
  TESSERA_CHECK(all.looked_up.count(op) == 0, "register_rule of ", op,
                " came after the operator's first use; register rules when the program starts");
  const bool added =
      all.rules.try_emplace(op, RuleFunction::Entry{std::move(rule), reads_numbers}).second;
  TESSERA_CHECK(added, "register_rule of ", op, " for the second time; keep only one call");
}

std::optional<ShardingRule> RuleFunction::operator()(const OpCall& call) const {
  if (rules::out_count(call.op) > 0) {
    return apply_out(entry_->body, call);
  }
  if (rules::is_inplace(call.op)) {
    return apply_inplace(entry_->body, call);
  }
  return entry_->body(call);
}

RuleFunction find_rule(std::string_view op) {
  if (const auto* own = look_up_user_rule(op)) {
    return RuleFunction(own);
  }
  const auto found = registry().entries.find(op);
  return found == registry().entries.end() ? nullptr : RuleFunction(&found->second);
}

std::vector<RuleFamily> rule_families() {
  return registry().families;
}

std::vector<std::string_view> ruled_operators() {
  std::vector<std::string_view> result;
  for (const auto& [op, entry] : registry().entries) {
    result.push_back(op);
  }
  return result;
}

std::vector<std::string> user_ruled_operators() {
  auto& all = user_rules();
  const std::lock_guard lock(all.mutex);
  std::vector<std::string> result;
  for (const auto& [op, entry] : all.rules) {
    result.push_back(op);
  }
  return result;
}

}  // namespace tessera
