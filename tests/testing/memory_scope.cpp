#include "testing/memory_scope.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace tessera::testing {

/// Never freed: tensors may outlive the scope.
struct MemoryScope::Counter {
  std::atomic<std::int64_t> bytes = 0;
  std::atomic<std::int64_t> peak = 0;

  void add(std::int64_t count) {
    const std::int64_t now = bytes += count;
    if (now > peak) peak = now;
  }
};

namespace {

thread_local MemoryScope::Counter* counting = nullptr;

/// In front of each block.
struct alignas(64) Header {
  MemoryScope::Counter* counter;
  std::int64_t bytes;
};

/// `data`: behind the header.
void free_block(void* data) {
  auto* header = static_cast<Header*>(data) - 1;
  if (header->counter != nullptr) header->counter->bytes -= header->bytes;
  std::free(header);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const std::size_t rounded = (bytes + sizeof(Header) - 1) / sizeof(Header) * sizeof(Header);
    void* memory = std::aligned_alloc(alignof(Header), sizeof(Header) + rounded);
    if (memory == nullptr) throw std::bad_alloc();
    auto* header = new (memory) Header{counting, static_cast<std::int64_t>(bytes)};
    if (counting != nullptr) counting->add(header->bytes);
    return {header + 1, header + 1, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

MemoryScope::MemoryScope() : counter_(new Counter) {
  static CountingAllocator allocator;
  static const bool installed = [] {
    c10::SetCPUAllocator(&allocator, /*priority=*/255);
    return true;
  }();
  static_cast<void>(installed);
  counting = counter_;
}

MemoryScope::~MemoryScope() {
  counting = nullptr;
}

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
