#include "memory/reusable_storage.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>

#include <utility>

#include "tessera/internals/detail/tensors.h"

namespace tessera::fsdp {

ReusableStorage::ReusableStorage(std::int64_t bytes, c10::Device device)
    : storage_(at::empty({0}, at::dtype(at::kByte).device(device)).storage()), bytes_(bytes) {}

void ReusableStorage::allocate() {
  set(storage_.allocator()->allocate(static_cast<std::size_t>(bytes_)));
}

/// The data pointer holds the tensor: views of it may outlive the owner.
void ReusableStorage::lend(at::Tensor memory) {
  void* const data = memory.mutable_data_ptr();
  const c10::Device device = memory.device();
  set(at::DataPtr(
      data, new at::Tensor(std::move(memory)),
      [](void* held) { delete static_cast<at::Tensor*>(held); }, device));
}

void ReusableStorage::set(at::DataPtr memory) {
  tessera::detail::set_memory(storage_, std::move(memory), bytes_);
}

void ReusableStorage::free() {
  tessera::detail::free_memory(storage_);
}

at::Tensor ReusableStorage::tensor(std::vector<std::int64_t> sizes, c10::ScalarType dtype,
                                   std::int64_t byte_offset) const {
  const auto item = static_cast<std::int64_t>(c10::elementSize(dtype));
  return tessera::detail::tensor_over(storage_, byte_offset / item, sizes, dtype);
}

}  // namespace tessera::fsdp
