#pragma once

#include <cstddef>
#include <memory>

#include "tessera/internals/detail/threads.h"

namespace tessera::testing {

/// Is notified when tensors allocate and free host memory. Another thread may free a block.
class AllocationWatcher {
 public:
  virtual ~AllocationWatcher() = default;
  virtual void allocated(void* data, std::size_t bytes) = 0;
  /// Called just before the memory is freed.
  virtual void freed(void* data, std::size_t bytes) = 0;
};

/// While it exists, `watcher` is notified of the memory that this thread and its backwards
/// allocate, and later of its release. From a program's first scope on, tensors use an allocator
/// that can be watched. One scope per thread at a time.
class AllocationScope {
 public:
  explicit AllocationScope(std::shared_ptr<AllocationWatcher> watcher);

  using Carried =
      detail::CarriedScope<detail::Carried::kMemoryScope, std::shared_ptr<AllocationWatcher>>;

 private:
  Carried carried_;
};

}  // namespace tessera::testing
