#include "testing/memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <utility>

namespace tessera::testing {
namespace {

std::shared_ptr<AllocationWatcher> watching() {
  const auto* watcher = AllocationScope::Carried::active();
  return watcher == nullptr ? nullptr : *watcher;
}

/// Stored before each memory block. Keeps the watcher alive after the AllocationScope has ended.
struct alignas(64) Header {
  std::shared_ptr<AllocationWatcher> watcher;
  std::size_t bytes;
};

/// `data`: the address of the memory block, which follows its Header.
void free_block(void* data) {
  auto* header = static_cast<Header*>(data) - 1;
  if (header->watcher != nullptr) {
    header->watcher->freed(data, header->bytes);
  }
  header->~Header();
  std::free(header);
}

class WatchedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const std::size_t rounded = (bytes + sizeof(Header) - 1) / sizeof(Header) * sizeof(Header);
    void* memory = std::aligned_alloc(alignof(Header), sizeof(Header) + rounded);
    if (memory == nullptr) {
      throw std::bad_alloc();
    }
    auto* header = new (memory) Header{watching(), bytes};
    if (header->watcher != nullptr) {
      header->watcher->allocated(header + 1, bytes);
    }
    return {header + 1, header + 1, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

AllocationScope::AllocationScope(std::shared_ptr<AllocationWatcher> watcher)
    : carried_(std::move(watcher)) {
  static WatchedAllocator allocator;
  static const bool installed = [] {
    c10::SetCPUAllocator(&allocator, /*priority=*/255);
    return true;
  }();
  static_cast<void>(installed);
}

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
