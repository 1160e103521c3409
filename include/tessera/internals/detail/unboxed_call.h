// Turns a call on a stack back into one with typed results, in kernels that take both. libtorch's
// KernelFunction makes such calls itself, of kernels that are registered boxed, and does not export
// the conversion.
//
// No version differs.
//
// Canary: UnboxedCallCanary.
#pragma once

#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/stack.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// What an operator of this type has left on the stack.
template <class Result>
Result take_result(torch::jit::Stack& stack) {
  return c10::impl::PopResult<Result>::call(stack);
}

}  // namespace tessera::detail
TESSERA_API_END
