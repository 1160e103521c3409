#pragma once

#include <span>

#include "call_plan.h"

namespace tessera::detail {

/// Whether the call may throw, for what it finds in the values, on some ranks alone: a
/// factorisation of matrices that the ranks share out.
bool may_fail_apart(const OperatorInfo& info, const CallPlan& plan,
                    std::span<const c10::IValue> arguments);

/// As run_call, then one all-reduce of one number over the whole mesh. True if no rank failed. Else
/// the stack holds the call's arguments, replicated: the same call of those fails on every rank,
/// and speaks of the whole. Collective.
bool run_agreed(const c10::OperatorHandle& op, const OperatorInfo& info, CallPlan& plan,
                torch::jit::Stack& stack);

}  // namespace tessera::detail
