#pragma once

#include <optional>
#include <span>
#include <vector>

#include "operators/bound_call.h"
#include "plan/call_plan.h"

namespace tessera::detail {

/// The rule of the call's operator, without what the values in this call don't allow: reductions
/// that their types do not have, sums that would be rounded term by term or scaled to infinity.
/// nullopt where no rule covers the call. A pure function of what is in the call's key.
std::optional<ShardingRule> rule_of_call(const OperatorInfo& info, const BoundCall& bound,
                                         std::span<const c10::IValue> arguments);

/// The strides of each result of a view operator on whole tensors; nullopt: unknown.
using GlobalStrides = std::optional<std::vector<std::vector<std::int64_t>>>;

/// Plans the call as its rule says: where inputs go, what runs on the local tensors and the layouts
/// of the results.
void plan_by_rule(CallPlan& plan, const OperatorInfo& info, const ShardingRule& rule,
                  const BoundCall& bound, std::span<const c10::IValue> arguments,
                  GlobalStrides view_strides);

// For any plan.

/// The tensors, by their numbers in `bound`, of the arguments that the operator writes to.
std::vector<std::size_t> written_inputs(const OperatorInfo& info, const BoundCall& bound);

/// Plans to bring an input to `target`; nullptr: it stays.
void bring_to(CallPlan& plan, CallPlan::Input& input, LayoutPtr target);

/// Finds the written tensors whose value must be copied to them.
void plan_writes(CallPlan& plan, const OperatorInfo& info, const BoundCall& bound,
                 std::span<const ShardingRule::Inplace> inplace);

}  // namespace tessera::detail
