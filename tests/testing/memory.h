#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tessera/internals/detail/threads.h"

namespace tessera::testing {

/// Is notified when host memory of tensors is allocated and freed. Any thread can free memory.
class AllocationWatcher {
 public:
  virtual ~AllocationWatcher() = default;
  virtual void allocated(void* data, std::size_t bytes) = 0;
  /// Called before the memory is freed.
  virtual void freed(void* data, std::size_t bytes) = 0;
};

/// While an AllocationScope exists, `watcher` is notified of memory that this thread and its
/// backwards allocate, and later of the memory's release. The first AllocationScope replaces the
/// CPU allocator of the process. A thread has at most one AllocationScope at a time.
class AllocationScope {
 public:
  explicit AllocationScope(std::shared_ptr<AllocationWatcher> watcher);

  using Carried =
      detail::CarriedScope<detail::Carried::kMemoryScope, std::shared_ptr<AllocationWatcher>>;

 private:
  Carried carried_;
};

/// Counts the host memory of tensors that this thread and its backwards allocate while the
/// MemoryScope exists and that is not freed. A thread has at most one MemoryScope at a time.
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

/// Counts all CPU memory that this thread allocates and frees while the object exists, like
/// libtorch's profiler: also the scratch memory of kernels.
class AllocatedBytes {
 public:
  AllocatedBytes() : guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}

  /// The bytes that were allocated and not freed since construction.
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
