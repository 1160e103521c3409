#pragma once

#include <ATen/core/ivalue.h>

#include <span>

#include "operator_info.h"

namespace tessera::detail {

/// Runs an in-place random operator (uniform_, normal_, bernoulli_) by the global element: nothing
/// is gathered, and every mesh draws the same numbers. False, and nothing done, for another
/// operator, where the caller gives a generator, and for a tensor that is not floating-point, holds
/// the copy of a view or is not distributed.
bool fill_by_element(const OperatorInfo& info, std::span<const c10::IValue> arguments);

}  // namespace tessera::detail
