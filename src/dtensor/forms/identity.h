#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/core/placement.h"

namespace tessera::detail {

/// A tensor that changes nothing in a maximum or minimum with another.
at::Tensor identity(c10::IntArrayRef sizes, ReduceOp op, const at::TensorOptions& options);

}  // namespace tessera::detail
