#pragma once

#include <cstddef>
#include <memory>

#include "tessera/internals/detail/carried_slot.h"

namespace tessera::testing {

/// Is told of the host memory of tensors. What a thread has allocated may be freed by another.
class AllocationWatcher {
 public:
  virtual ~AllocationWatcher() = default;
  virtual void allocated(void* data, std::size_t bytes) = 0;
  /// Just before.
  virtual void freed(void* data, std::size_t bytes) = 0;
};

/// While it exists, `watcher` is told of what this thread and its backwards allocate, and later of
/// its end. From the first scope of a program on, its tensors come from an allocator that can tell.
/// One a thread at a time.
class AllocationScope {
 public:
  explicit AllocationScope(std::shared_ptr<AllocationWatcher> watcher);

  using Carried =
      detail::CarriedScope<detail::Carried::kMemoryScope, std::shared_ptr<AllocationWatcher>>;

 private:
  Carried carried_;
};

}  // namespace tessera::testing
