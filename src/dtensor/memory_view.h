#pragma once

#include <ATen/core/ivalue.h>

#include <span>

#include "call_plan.h"

namespace tessera::detail {

/// Makes the storage offset of as_strided and its forms that of the local tensor, the first of the
/// `arguments`: a distributed tensor's own offset is 0, wherever its local tensor begins. Throws
/// Error, on all ranks, where a gathered tensor lies otherwise than the whole would, or would be
/// asked for memory between its elements.
void begin_at_local_tensor(const OperatorInfo& info, const CallPlan& plan,
                           std::span<c10::IValue> arguments);

}  // namespace tessera::detail
