// The same values as a view that must not be changed in place. A function that returns its argument
// must not return the tensor itself; torch::autograd::Function does the same for its own results,
// and does not export it.
//
// No version differs.
//
// Canary: GuardedViewCanary.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// libtorch refuses to change it in place: its node would be lost, and `tensor` would have new
/// values with its old history. It has no history yet.
at::Tensor guarded_view(const at::Tensor& tensor);

}  // namespace tessera::detail
TESSERA_API_END
