#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/comm/communicator.h"

namespace tessera::fsdp {

/// The local part of a whole parameter's gradient.
struct WholeGradient {
  at::Tensor local;  ///< undefined: none came
  /// Other ranks hold terms of it too: to be summed over this group. nullptr: it is complete.
  comm::Communicator* pending = nullptr;
};

/// The gradient of `whole`, taken off it. A gradient that is a pending sum stays one; one that
/// lies otherwise than the parameter is redistributed, which is collective.
WholeGradient take_gradient(const at::Tensor& whole);

/// Adds `gradient` to `sum`, in `dtype`.
void add_gradient(WholeGradient& sum, const WholeGradient& gradient, c10::ScalarType dtype);

}  // namespace tessera::fsdp
