#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tessera/internals/detail/threads.h"

namespace tessera::testing {

/// Called for each allocation and each free of a CPU tensor's memory, from any thread.
class AllocationWatcher {
 public:
  virtual ~AllocationWatcher() = default;
  virtual void allocated(void* data, std::size_t bytes) = 0;
  /// Called before the memory at `data` is freed.
  virtual void freed(void* data, std::size_t bytes) = 0;
};

/// Calls `watcher` when this thread or its backward passes allocate memory of CPU tensors, and when
/// this memory is freed (also after the AllocationScope). Only one AllocationScope may exist on a
/// thread.
class AllocationScope {
 public:
  explicit AllocationScope(std::shared_ptr<AllocationWatcher> watcher);

  using Carried =
      detail::CarriedScope<detail::Carried::kMemoryScope, std::shared_ptr<AllocationWatcher>>;

 private:
  Carried carried_;
};

/// Counts the bytes of CPU tensors that this thread and its backward passes allocate and do not
/// free. Only one MemoryScope may exist on a thread.
class MemoryScope {
 public:
  MemoryScope();

  std::int64_t bytes() const;
  /// Returns the maximum of bytes() since construction or the last reset_peak().
  std::int64_t peak() const;
  void reset_peak();

 private:
  class Counter;

  std::shared_ptr<Counter> counter_;
  AllocationScope scope_;
};

/// Counts CPU memory that this thread allocates and frees, as libtorch's profiler does: the scratch
/// memory of kernels is included.
class AllocatedBytes {
 public:
  AllocatedBytes() : guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}

  /// Returns allocated minus freed bytes since construction; can be negative.
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
