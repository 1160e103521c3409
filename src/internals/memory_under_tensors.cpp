#include "tessera/internals/detail/memory_under_tensors.h"

#include <ATen/ops/empty.h>

#include <cstddef>
#include <utility>

namespace tessera::detail {

void set_memory(const c10::Storage& storage, at::DataPtr memory, std::int64_t bytes) {
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  // noswap: the old pointer is not needed.
  impl.set_data_ptr_noswap(std::move(memory));
  impl.set_nbytes(static_cast<std::size_t>(bytes));
}

void free_memory(const c10::Storage& storage) {
  // The null pointer keeps the device, which tensors over the storage report.
  set_memory(storage, at::DataPtr(nullptr, storage.device()), 0);
}

void move_onto(const at::Tensor& tensor, const c10::Storage& storage, std::int64_t offset) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  // libtorch forbids it for tensors that came from detach().
  impl.set_allow_tensor_metadata_change(true);
  impl.set_storage_keep_dtype(storage);
  impl.set_storage_offset(offset);
}

at::Tensor tensor_over(const c10::Storage& storage, std::int64_t offset, c10::IntArrayRef sizes,
                       c10::ScalarType dtype) {
  at::Tensor tensor = at::empty({0}, at::dtype(dtype).device(storage.device()));
  move_onto(tensor, storage, offset);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

void restore_sizes(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

}  // namespace tessera::detail
