#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>

namespace tessera::testing {

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
