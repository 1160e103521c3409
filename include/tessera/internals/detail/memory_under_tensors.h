// Memory that goes and comes back under tensors that stay, and tensors that move to other memory:
// what PyTorch calls storage resize. Public are Tensor::set_(), an operator, which counts as a
// write and resizes a storage that is too small, and set_data(), which replaces the tensor's state.
// Here no operator runs: no version counter moves, and autograd accepts what it has saved.
//
// No version differs in what is used. From 2.15 a storage materializes its data when it is asked
// for; memory that is set here is not of that kind.
//
// Canary: MemoryUnderTensorsCanary.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Sets the memory of `storage`; its old memory is freed.
void set_memory(const c10::Storage& storage, at::DataPtr memory, std::int64_t bytes);
/// Tensors keep their sizes and strides; nothing may read them then.
void free_memory(const c10::Storage& storage);
/// Whether the elements of a plain tensor have memory now.
inline bool has_memory(const at::Tensor& tensor) {
  return tensor.numel() == 0 || tensor.storage().nbytes() > 0;
}

/// `tensor`, the same object, uses the memory of `storage` from `offset` on, counted in elements.
/// Sizes, strides and type stay.
void move_onto(const at::Tensor& tensor, const c10::Storage& storage, std::int64_t offset);

/// A contiguous tensor of a storage that may be without memory now.
at::Tensor tensor_over(const c10::Storage& storage, std::int64_t offset, c10::IntArrayRef sizes,
                       c10::ScalarType dtype);

/// Gives a tensor that an operator has resized its sizes back; its memory is large enough.
void restore_sizes(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides);

}  // namespace tessera::detail
TESSERA_API_END
