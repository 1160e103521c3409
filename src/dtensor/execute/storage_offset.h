#pragma once

#include <ATen/core/ivalue.h>

#include <span>

#include "plan/call_plan.h"

namespace tessera::detail {

// as_strided: sizes and strides in memory, wherever that begins.

/// Adds the storage offset of the local tensor, the first of `arguments`, to the offset argument of
/// as_strided and its variants. A distributed tensor's own offset is 0, wherever its local tensor
/// begins. Throws Error, on all ranks, if the tensor had to be gathered and has other strides now
/// than the distributed tensor, or if memory between its elements is asked for, which was not
/// gathered.
void add_local_storage_offset(const OperatorInfo& info, const CallPlan& plan,
                              std::span<c10::IValue> arguments);

}  // namespace tessera::detail
