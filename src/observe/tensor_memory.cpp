// An allocator in front of libtorch's CPU allocator, which counts. Its other form reserves
// addresses and lets the system find memory for what is written, which in a FakeMode is nothing.

#include "tessera/observe/tensor_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/internals/detail/devices.h"

namespace tessera::observe {
namespace {

/// Below this a block is cheaper from the heap than from the system.
constexpr std::size_t kReserveFrom = std::size_t{1} << 16;

TensorMemoryOptions& counting_options() {
  static TensorMemoryOptions options;
  return options;
}

std::atomic<bool> counting = false;
std::atomic<std::int64_t> live = 0;
std::atomic<std::int64_t> highest = 0;
std::atomic<std::uint64_t> allocations = 0;

/// Data that is needed when a block is freed.
struct Counted {
  TensorBlock block;
  c10::DataPtr memory;             ///< from libtorch's allocator
  std::size_t reserved_bytes = 0;  ///< or from the system
};

/// By address: libtorch's raw allocations know nothing else of a block.
struct Blocks {
  std::mutex mutex;
  std::unordered_map<void*, Counted> by_address;
};
/// Never freed: tensors may outlive main().
Blocks& blocks() {
  static auto* const all = new Blocks();
  return *all;
}

void raise_highest(std::int64_t now) {
  std::int64_t before = highest.load();
  while (before < now && !highest.compare_exchange_weak(before, now)) {
  }
}

void tell(const TensorBlock& block) {
  if (counting_options().observer) {
    counting_options().observer(block);
  }
}

Counted take_block(void* data) {
  const std::lock_guard lock(blocks().mutex);
  const auto found = blocks().by_address.find(data);
  Counted counted = std::move(found->second);
  blocks().by_address.erase(found);
  return counted;
}

void free_counted(void* data) {
  if (data == nullptr) {
    return;
  }
  Counted counted = take_block(data);
  live -= counted.block.bytes;
  counted.block.freed = true;
  tell(counted.block);
  if (counted.reserved_bytes > 0) {
    munmap(data, counted.reserved_bytes);
  }
}

void* reserve(std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TESSERA_CHECK(
      memory != MAP_FAILED, "can't reserve ", bytes,
      " bytes of addresses for a tensor; ask for a smaller batch or shorter sequences, or "
      "lift a limit of this process (ulimit -v)");
  return memory;
}

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &free_counted, c10::Device(c10::kCPU)};
    }
    const TensorMemoryOptions& options = counting_options();
    const auto size = static_cast<std::int64_t>(bytes);
    Counted counted;
    counted.block = {++allocations,
                     (size + options.granularity - 1) / options.granularity * options.granularity,
                     false};
    const bool reserves = options.reserve_only && bytes >= kReserveFrom;
    counted.reserved_bytes = reserves ? bytes : 0;
    counted.memory = reserves ? c10::DataPtr() : inner_->allocate(bytes);
    void* const data = reserves ? reserve(bytes) : counted.memory.get();
    counted.block.data = data;
    const TensorBlock block = counted.block;
    {
      const std::lock_guard lock(blocks().mutex);
      blocks().by_address.emplace(data, std::move(counted));
    }
    raise_highest(live += block.bytes);
    tell(block);
    return {data, data, &free_counted, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* inner_;
};

}  // namespace

void count_tensor_memory(TensorMemoryOptions options) {
  counting_options() = std::move(options);
  if (counting.exchange(true)) {
    return;
  }
  // Never freed: tensors may outlive main().
  static auto* const allocator = new CountingAllocator(tessera::detail::cpu_allocator());
  tessera::detail::set_cpu_allocator(allocator);
}

std::optional<std::int64_t> tensor_bytes() {
  return counting ? std::optional(live.load()) : std::nullopt;
}

std::optional<std::int64_t> take_peak_tensor_bytes() {
  return counting ? std::optional(highest.exchange(live.load())) : std::nullopt;
}

}  // namespace tessera::observe
