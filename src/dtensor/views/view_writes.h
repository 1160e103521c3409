#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "tensor/distributed_impl.h"

namespace tessera::detail {

/// Throws Error if `impl`, a detached view, may not be written.
void check_writable(const DistributedTensorImpl& impl, std::string_view what);

/// Writes the values of `view`, a detached view, to its base, and so on if the base is a detached
/// view too. Collective: the base is gathered and sliced again.
void write_through(const at::Tensor& view);

}  // namespace tessera::detail
