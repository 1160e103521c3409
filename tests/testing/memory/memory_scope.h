#pragma once

#include <cstdint>
#include <memory>

#include "testing/memory/watched_allocator.h"

namespace tessera::testing {

/// Counts the host memory of tensors that this thread and its backwards allocate from construction
/// on, until any thread frees it. One scope per thread at a time.
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

}  // namespace tessera::testing
