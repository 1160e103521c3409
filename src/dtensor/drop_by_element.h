#pragma once

#include <ATen/core/stack.h>

#include "operator_info.h"

namespace tessera::detail {

/// Runs native_dropout by the global element: every mesh drops the same ones. The call's arguments
/// on the stack are replaced by its results. A pending reduction is carried out first, which is
/// collective. False, and nothing done, for another operator, and for a tensor that is not
/// distributed or not floating-point, or whose reduction the strict scope refuses.
bool drop_by_element(const OperatorInfo& info, torch::jit::Stack& stack);

}  // namespace tessera::detail
