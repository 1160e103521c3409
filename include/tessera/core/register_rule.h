// The function by which a program registers sharding rules for its operators.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "tessera/core/sharding_rule.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Gives operator `op` a sharding rule, or replaces the library's rule. `op`: the full name, such
/// as "mylib::scale" or "mylib::scale.out". `rule` returns nullopt for a call that the rule does
/// not cover. `reads_numbers`: whether the rule depends on the values of float and Scalar
/// arguments. Register in-place and out= variants separately. Every process must register the same
/// rules. Not collective. Thread safe.
///
/// Throws Error after the first use of `op` on a distributed tensor, and for a second rule. The
/// first call of any operator throws Error if `op` does not exist or is CompositeImplicitAutograd.
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
