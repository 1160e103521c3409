#pragma once

#include <cstddef>
#include <memory>

#include "tessera/internals/detail/threads.h"

namespace tessera::testing {

/// Is notified of the host memory of tensors. What a thread has allocated may be freed by another.
class AllocationWatcher {
 public:
  virtual ~AllocationWatcher() = default;
  virtual void allocated(void* data, std::size_t bytes) = 0;
  /// Called just before the memory is freed.
  virtual void freed(void* data, std::size_t bytes) = 0;
};

/// While it exists, `watcher` sees what this thread and its backwards allocate, and later when it
/// is freed. From a program's first scope on, its tensors come from an allocator that can be
/// watched. One scope a thread at a time.
class AllocationScope {
 public:
  explicit AllocationScope(std::shared_ptr<AllocationWatcher> watcher);

  using Carried =
      detail::CarriedScope<detail::Carried::kMemoryScope, std::shared_ptr<AllocationWatcher>>;

 private:
  Carried carried_;
};

}  // namespace tessera::testing
