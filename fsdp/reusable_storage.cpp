#include "reusable_storage.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>

namespace tessera::fsdp {

ReusableStorage::ReusableStorage(std::int64_t bytes, c10::Device device)
    : storage_(at::empty({0}, at::dtype(at::kByte).device(device)).storage()), bytes_(bytes) {}

void ReusableStorage::allocate() {
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
  storage.set_data_ptr_noswap(storage.allocator()->allocate(static_cast<std::size_t>(bytes_)));
  storage.set_nbytes(static_cast<std::size_t>(bytes_));
}

void ReusableStorage::free() {
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
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
