#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <vector>

#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

/// Memory under tensors that outlive it: it can be freed and allocated again while parameters, and
/// what autograd saved of them, keep pointing to it. Contents are lost in between; version counters
/// do not move, so autograd accepts the tensors again once they are refilled. FSDP2's
/// "storage resize".
class ReusableStorage {
 public:
  ReusableStorage() = default;
  /// A storage of `bytes`, not allocated yet.
  ReusableStorage(std::int64_t bytes, c10::Device device);

  std::int64_t bytes() const { return bytes_; }
  bool allocated() const { return storage_ && storage_.nbytes() > 0; }
  /// From the device's allocator.
  void allocate();
  /// `memory`, at least as many bytes, which this keeps until free().
  void lend(at::Tensor memory);
  void free();

  /// A contiguous tensor over this storage from `byte_offset` on.
  at::Tensor tensor(std::vector<std::int64_t> sizes, c10::ScalarType dtype,
                    std::int64_t byte_offset) const;

 private:
  void set(at::DataPtr memory);

  c10::Storage storage_;
  std::int64_t bytes_ = 0;
};

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END
