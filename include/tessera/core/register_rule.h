// The function by which a program registers sharding rules for its operators.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "tessera/core/sharding_rule.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Gives operator `op` a sharding rule, or replaces the library's rule for `op`. `op` is the
/// operator's full name: "mylib::scale", "mylib::scale.out". For an in-place or out= variant,
/// register the same rule again under the variant's name. `rule` returns nullopt for a call that
/// the rule does not cover. `reads_numbers`: whether the rule depends on the values of float and
/// Scalar arguments. Every process of a job must register the same rules. Not collective. Thread
/// safe. Throws Error after the operator's first use on a distributed tensor, and for a second rule
/// of one operator. The first call of any operator throws Error if a registered `op` does not
/// exist, or if `op` is CompositeImplicitAutograd: libtorch replaces such an operator by others, so
/// the rule of `op` would never be used.
///
///   // An elementwise operator. Input and output have one common factor for each dimension.
///   register_rule("mylib::scale", [](const OpCall& call) -> std::optional<ShardingRule> {
///     ShardingRule rule = rules::start(call);
///     const auto dims = rules::add_factors(rule, call.tensor(0).sizes);
///     rule.inputs = {dims};
///     rule.outputs = {dims};
///     rule.linear = {{.partial_inputs = {0}, .op = ReduceOp::kSum}};
///     return rule;
///   });
void register_rule(std::string op, std::function<std::optional<ShardingRule>(const OpCall&)> rule,
                   bool reads_numbers = false);

}  // namespace tessera
TESSERA_API_END
