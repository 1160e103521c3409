#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::detail {

/// Whether several positions of `tensor` are one in memory: along a dimension of stride 0.
inline bool is_expanded(const at::Tensor& tensor) {
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) return true;
  }
  return false;
}

/// The first position of `tensor` along the dimensions of stride 0.
inline at::Tensor one_of_expanded(at::Tensor tensor, at::IntArrayRef strides) {
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const bool expanded = strides[static_cast<std::size_t>(dim)] == 0 && tensor.size(dim) > 1;
    if (expanded) tensor = tensor.narrow(dim, 0, 1);
  }
  return tensor;
}

/// `tensor`, whose values along dimensions of stride 0 are equal, with one place for them.
inline at::Tensor expanded_as(const at::Tensor& tensor, at::IntArrayRef strides) {
  return one_of_expanded(tensor, strides).expand(tensor.sizes());
}

/// Copies `value` to `to`, of which positions that are one in memory get one value.
inline void copy_to_expanded(const at::Tensor& to, const at::Tensor& value) {
  one_of_expanded(to, to.strides()).copy_(one_of_expanded(value, to.strides()));
}

}  // namespace tessera::detail
