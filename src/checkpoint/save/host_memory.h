// Memory of the host for the copies that a save in the background writes.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace tessera::checkpoint {

/// One mapping for all copies of a save, in pages of 2 MiB where the kernel gives them: to clear
/// 512 small pages one by one takes as long as the copy that fills them. Once no tensor uses it the
/// kernel may take its pages, and the next save of the same size has those that it left.
class HostMemory {
 public:
  /// `bytes`: of all tensors, each rounded up by rounded(). Throws Error where there are not as
  /// many.
  explicit HostMemory(std::int64_t bytes);

  static std::int64_t rounded(std::int64_t bytes);
  /// A contiguous tensor, whose values are not set.
  at::Tensor take(at::IntArrayRef sizes, c10::ScalarType dtype);

 private:
  std::shared_ptr<void> memory_;
  std::int64_t bytes_;
  std::int64_t taken_ = 0;
};

}  // namespace tessera::checkpoint
