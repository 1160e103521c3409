#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstddef>
#include <cstdint>
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

/// Counts the host memory of tensors that this thread and its backwards allocate from construction
/// on, until any thread frees it. A thread may have one such object at a time.
class MemoryScope {
 public:
  MemoryScope();

  std::int64_t bytes() const;
  /// The most since construction or the last call of reset_peak().
  std::int64_t peak() const;
  void reset_peak();

 private:
  class Counter;

  std::shared_ptr<Counter> counter_;
  AllocationScope scope_;
};

/// Counts the bytes that this thread's tensors allocate and free on the CPU while it exists, as
/// libtorch's profiler does. Also counts raw scratch memory of kernels.
class AllocatedBytes {
 public:
  AllocatedBytes() : guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}

  /// Bytes that were allocated since construction and are not freed.
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
