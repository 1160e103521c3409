#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include "operator_info.h"

namespace tessera::detail {

/// Many formulas of gradients make zeros of the input's sizes and then write the gradient into
/// them. The zeros' layout is a guess, for at that time nobody knows what will be written. Until
/// then they are theirs alone, so that they may still be laid out otherwise.

/// Notes that `tensor` was just made. Only inside backward, one a thread.
void note_fresh(const at::Tensor& tensor);

/// An in-place operator that would gather what it writes to such a tensor: runs its functional
/// form, and the tensor becomes the result, in whatever layout that has. False: it was another
/// tensor, and nothing has happened.
bool write_to_fresh(const OperatorInfo& info, torch::jit::Stack& stack);

}  // namespace tessera::detail
