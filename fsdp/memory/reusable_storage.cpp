// The one place that changes the data pointer under live tensors. No operator runs on them, so that
// no version counter moves and autograd accepts what it has saved.

#include "memory/reusable_storage.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>

#include <utility>

namespace tessera::fsdp {

ReusableStorage::ReusableStorage(std::int64_t bytes, c10::Device device)
    : storage_(at::empty({0}, at::dtype(at::kByte).device(device)).storage()), bytes_(bytes) {}

void ReusableStorage::allocate() {
  set(storage_.allocator()->allocate(static_cast<std::size_t>(bytes_)));
}

/// The data pointer holds the tensor: somebody may still have a view of it when the owner goes.
void ReusableStorage::lend(at::Tensor memory) {
  void* const data = memory.mutable_data_ptr();
  const c10::Device device = memory.device();
  set(at::DataPtr(
      data, new at::Tensor(std::move(memory)),
      [](void* held) { delete static_cast<at::Tensor*>(held); }, device));
}

void ReusableStorage::set(at::DataPtr memory) {
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
  // noswap: nobody wants the old pointer, which is null.
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(static_cast<std::size_t>(bytes_));
}

/// The tensors keep their sizes and strides: reading them now is libtorch's error.
void ReusableStorage::free() {
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
  // The null pointer keeps the device, which tensors over the storage report.
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, storage.device()));
  storage.set_nbytes(std::size_t{0});
}

at::Tensor ReusableStorage::tensor(std::vector<std::int64_t> sizes, c10::ScalarType dtype,
                                   std::int64_t byte_offset) const {
  at::Tensor tensor = at::empty({0}, at::dtype(dtype).device(storage_.device()));
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  // Not set_(): that would resize a storage that is not allocated.
  impl.set_storage_keep_dtype(storage_);
  impl.set_storage_offset(byte_offset / static_cast<std::int64_t>(tensor.itemsize()));
  impl.set_sizes_contiguous(sizes);
  return tensor;
}

}  // namespace tessera::fsdp
