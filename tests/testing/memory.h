#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tessera/internals/detail/threads.h"

namespace tessera::testing {

/// An interface for notifications of the host memory of tensors. Any thread can free memory.
class AllocationWatcher {
 public:
  virtual ~AllocationWatcher() = default;
  virtual void allocated(void* data, std::size_t bytes) = 0;
  /// Called before the memory is freed.
  virtual void freed(void* data, std::size_t bytes) = 0;
};

/// While the object exists, notifies `watcher` of memory that this thread and its backwards
/// allocate, and of the release of this memory. The first object changes the allocator of tensors
/// for the whole process. Each thread may have one object at a time.
class AllocationScope {
 public:
  explicit AllocationScope(std::shared_ptr<AllocationWatcher> watcher);

  using Carried =
      detail::CarriedScope<detail::Carried::kMemoryScope, std::shared_ptr<AllocationWatcher>>;

 private:
  Carried carried_;
};

/// Counts the host memory of tensors that this thread and its backwards allocate while the object
/// exists, until any thread frees the memory. Each thread may have one object at a time.
class MemoryScope {
 public:
  MemoryScope();

  std::int64_t bytes() const;
  /// The maximum of bytes() since construction or the last reset_peak().
  std::int64_t peak() const;
  void reset_peak();

 private:
  class Counter;

  std::shared_ptr<Counter> counter_;
  AllocationScope scope_;
};

/// While the object exists, counts the CPU memory that this thread allocates and frees, as
/// libtorch's profiler does. The scratch memory of kernels also counts.
class AllocatedBytes {
 public:
  AllocatedBytes() : guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}

  /// The number of bytes that were allocated since construction and are not freed.
  std::int64_t now() const { return counter_->now; }

 private:
  struct Counter final : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, std::int64_t bytes, std::size_t, std::size_t,
                           c10::Device) override {
      now += bytes;
    }
    bool memoryProfilingEnabled() const override { return true; }
    std::int64_t now = 0;
  };

  std::shared_ptr<Counter> counter_ = std::make_shared<Counter>();
  c10::DebugInfoGuard guard_;
};

}  // namespace tessera::testing
