// The table of sharding rules, and the decision of one rule for one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/detail/layout.h"
#include "tessera/core/sharding_rule.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The sharding rule of one operator: a pure function of a call of the operator. The function
/// returns nullopt for a call that the rule does not cover. A null RuleFunction means that the
/// operator has no rule. A RuleFunction points to an entry of a table that exists as long as the
/// program.
class RuleFunction {
 public:
  using Body = std::function<std::optional<ShardingRule>(const OpCall&)>;
  /// A rule, and whether the rule depends on the values of Scalar and float arguments.
  struct Entry {
    Body body;
    bool reads_numbers = false;
  };

  RuleFunction(std::nullptr_t = nullptr) {}
  explicit RuleFunction(const Entry* entry) : entry_(entry) {}

  explicit operator bool() const { return entry_ != nullptr; }
  std::optional<ShardingRule> operator()(const OpCall& call) const;
  /// Whether the rule depends on values of Scalar and float arguments (the order of a norm, the
  /// probability of a dropout). If so, these values are part of the dispatch cache's key.
  bool reads_numbers() const { return entry_ != nullptr && entry_->reads_numbers; }

 private:
  const Entry* entry_ = nullptr;
};

/// The rule of operator `op` ("aten::add.Tensor"): a user's rule (register_rule.h), or the
/// library's rule from the tables in src/core/rules/. Thread safe.
RuleFunction find_rule(std::string_view op);

/// The operators of one family of sharding rules, sorted by name.
struct RuleFamily {
  std::string_view name;
  std::vector<std::string_view> operators;
};
/// All families of sharding rules, in a fixed order.
std::vector<RuleFamily> rule_families();
/// Names of all operators for which the library has a rule, sorted.
std::vector<std::string_view> ruled_operators();
/// Names of all operators for which a user has registered a rule (register_rule.h), sorted.
std::vector<std::string> user_ruled_operators();

/// The decision of propagate() for one call.
struct Propagation {
  /// The layout to which each input must be redistributed. For an input whose values are not read,
  /// its own layout; nullptr for a plain tensor that may stay plain.
  std::vector<LayoutPtr> inputs;
  /// The layout of each output; nullptr for an output that is in no TensorGroup; such an output is
  /// replicated and has the sizes of the local result.
  std::vector<LayoutPtr> outputs;
  /// Global sizes of each output. A negative size is unknown to the rule; the dimension is
  /// unsharded, so the local result has this size.
  std::vector<std::vector<std::int64_t>> output_sizes;
  /// Whether ShardingRule::local_call must run instead of the operator.
  bool use_local_call = false;
};

/// The cheapest way to run `rule` on inputs with layouts `inputs` (nullptr: a plain tensor, which
/// counts as replicated; at least one is not nullptr). Greedy: decides the mesh dimensions one by
/// one, outermost first, in time linear in their number. For each mesh dimension propagate()
/// prefers a choice without data movement. Otherwise propagate() takes the choice that moves the
/// fewest bytes, including the later reduction of a Partial result. On a tie propagate() prefers
/// the layout of the largest input. Pure and thread safe. Throws Error if the layouts are for
/// different meshes or do not fit the tensors.
Propagation propagate(const ShardingRule& rule, const OpCall& call,
                      std::span<const LayoutPtr> inputs);

}  // namespace tessera

namespace tessera::detail {

/// Registers the rule of an operator that a layer above core defines. A program may replace the
/// rule with register_rule(). Must be called before main(). Throws Error after the first look-up of
/// a rule.
void add_library_rule(std::string op, RuleFunction::Body body, bool reads_numbers = false);

}  // namespace tessera::detail
TESSERA_API_END
