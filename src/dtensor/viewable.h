#pragma once

#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>

namespace tessera::detail {

/// `local`, or a copy of it where it cannot be viewed with `sizes`. _unsafe_view promises no alias,
/// and composite operators call it of results that lie in memory as kernels chose: for a part of
/// size 1 in some dimension otherwise than for the whole.
inline at::Tensor viewable(const at::Tensor& local, at::IntArrayRef sizes) {
  const auto strides = at::detail::computeStride(local.sizes(), local.strides(), sizes);
  return strides ? local : local.contiguous();
}

}  // namespace tessera::detail
