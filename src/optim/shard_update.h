#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace tessera::optim {

/// The local shard of a parameter that a step updates.
struct ShardUpdate {
  std::size_t index;     ///< index of the parameter in Optimizer::parameters()
  std::size_t group;     ///< index of the parameter's optimizer group
  at::Tensor parameter;  ///< the parameter's local tensor, without autograd
  at::Tensor gradient;   ///< the local gradient; undefined if the parameter has no gradient
};

/// The factor by which a step multiplies all gradients (Optimizer::step): a number, or a plain 0-d
/// tensor on a device.
struct GradientFactor {
  double number = 1.0;  ///< the factor, if `tensor` is undefined
  at::Tensor tensor = {};
};

}  // namespace tessera::optim
