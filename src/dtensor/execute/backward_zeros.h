#pragma once

#include <ATen/core/Tensor.h>

#include "plan/call_plan.h"

namespace tessera::detail {

// Many gradient formulas make zeros of the input's sizes and then write the gradient into them. The
// zeros' layout is a guess, since it is not known yet what will be written. Until then only the
// formula holds them, so their layout may still change.

/// Notes that `zeros` were just made. Only inside backward, one tensor a thread.
void note_backward_zeros(const at::Tensor& zeros);

/// If the call writes to the tensor that was noted: runs the functional form of its operator, and
/// the tensor becomes the result, in whatever layout that has. Else false, and nothing has
/// happened. Collective if the functional form is.
bool write_to_backward_zeros(PlannedCall& call);

}  // namespace tessera::detail
