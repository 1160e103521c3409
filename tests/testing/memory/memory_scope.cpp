#include "testing/memory/memory_scope.h"

#include <atomic>

namespace tessera::testing {

class MemoryScope::Counter final : public AllocationWatcher {
 public:
  void allocated(void*, std::size_t count) override {
    const std::int64_t now = bytes += static_cast<std::int64_t>(count);
    if (now > peak) {
      peak = now;
    }
  }
  void freed(void*, std::size_t count) override { bytes -= static_cast<std::int64_t>(count); }

  std::atomic<std::int64_t> bytes = 0;
  std::atomic<std::int64_t> peak = 0;
};

MemoryScope::MemoryScope() : counter_(std::make_shared<Counter>()), scope_(counter_) {}

std::int64_t MemoryScope::bytes() const {
  return counter_->bytes;
}

std::int64_t MemoryScope::peak() const {
  return counter_->peak;
}

void MemoryScope::reset_peak() {
  counter_->peak = counter_->bytes.load();
}

}  // namespace tessera::testing
