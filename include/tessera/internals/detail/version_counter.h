// A tensor's count of writes, by which autograd refuses a tensor that has changed since it was
// saved. Only Tensor::_version() is public, and it throws for an inference tensor. Writes that no
// operator makes must be counted explicitly, and a wrapper shares the counter of its inner tensor.
//
// Inline: views share counters on the hot path. No version differs.
//
// Canary: VersionCounterCanary.
#pragma once

#include <ATen/core/TensorBase.h>

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// 0 where it counts nothing: for a tensor made in inference mode.
inline std::uint32_t writes_of(const at::TensorBase& tensor) {
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

/// For a write that no operator has made. Throws for a tensor that counts nothing, but in inference
/// mode, where it does nothing.
inline void count_write(const at::TensorBase& tensor) {
  tensor.unsafeGetTensorImpl()->bump_version();
}

/// From now on a write to one is a write to both. Both must count.
inline void count_with(const at::TensorBase& tensor, const at::TensorBase& other) {
  tensor.unsafeGetTensorImpl()->set_version_counter(other.unsafeGetTensorImpl()->version_counter());
}

}  // namespace tessera::detail
TESSERA_API_END
