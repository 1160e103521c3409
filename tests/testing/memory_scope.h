#pragma once

#include <cstdint>

namespace tessera::testing {

/// Counts the host memory of tensors that this thread allocates, from construction on, until they
/// are freed, by whichever thread. From the first scope of a program on, its tensors come from an
/// allocator that counts. One scope a thread at a time.
class MemoryScope {
 public:
  MemoryScope();
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;
  ~MemoryScope();

  std::int64_t bytes() const;
  /// The most since construction or the last call of reset_peak().
  std::int64_t peak() const;
  void reset_peak();

  struct Counter;

 private:
  Counter* counter_;
};

}  // namespace tessera::testing
