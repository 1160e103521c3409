// Counts how many more allocations a cached call needs on distributed than on plain tensors.

#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdlib>
#include <new>

#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "testing/distributed.h"

namespace {

thread_local int objects = 0;

}  // namespace

void* operator new(std::size_t bytes) {
  ++objects;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) {
    return memory;
  }
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++objects;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace tessera {
namespace {

using Tensors = std::vector<at::Tensor>;
using Call = std::function<std::vector<at::Tensor>(const Tensors&)>;

class StorageCounter final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, std::int64_t bytes, std::size_t, std::size_t,
                         c10::Device) override {
    if (bytes > 0) {
      ++allocations;
    }
  }
  bool memoryProfilingEnabled() const override { return true; }
  int allocations = 0;
};

struct Cost {
  int objects = 0;
  int storages = 0;
};

/// Counts heap allocations and storages of `call`, run a fourth time: the caches are then full.
Cost cost_of(const Call& call, const Tensors& inputs) {
  const auto counter = std::make_shared<StorageCounter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
  for (int i = 0; i < 3; ++i) {
    call(inputs);
  }
  const int before = objects, storages = counter->allocations;
  const auto results = call(inputs);
  return {objects - before, counter->allocations - storages};
}

struct Case {
  const char* name;
  Tensors inputs;
  Call call;
  int wrappers = 1;  ///< number of distributed tensors in the result
};

DeviceMesh mesh() {
  static const auto one = init_device_mesh(comm::fake_world(0, 1), {1}, {"x"});
  return one;
}

Tensors distributed(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) {
    result.push_back(distribute_tensor(tensor, mesh(), {Shard{0}}).tensor().detach());
  }
  return result;
}

std::vector<Case> cases() {
  const auto x = at::rand({8, 8});
  const Tensors none;
  return {
      {"add", {x, x}, [](auto& t) { return Tensors{at::add(t[0], t[1])}; }},
      {"mul_", {x, x}, [](auto& t) { return Tensors{t[0].mul_(t[1])}; }, 0},
      {"view", {x}, [](auto& t) { return Tensors{t[0].view({64})}; }},
      {"t", {x}, [](auto& t) { return Tensors{t[0].t()}; }},
      {"mm", {x, x}, [](auto& t) { return Tensors{at::mm(t[0], t[1])}; }},
      {"addmm", {x, x, x}, [](auto& t) { return Tensors{at::addmm(t[0], t[1], t[2])}; }},
      {"sum", {x}, [](auto& t) { return Tensors{at::sum(t[0], 1)}; }},
      {"softmax", {x}, [](auto& t) { return Tensors{at::softmax(t[0], -1)}; }},
      {"silu_mul", {x, x}, [](auto& t) { return Tensors{detail::silu_mul(t[0], t[1])}; }},
      {"split", {x}, [](auto& t) { return t[0].split(4, 1); }, 2},
  };
}

TEST(DispatchCost, AllocatesOnlyTheWrappers) {
  const at::AutoGradMode no_grad(false);
  at::set_num_threads(1);
  for (const auto& c : cases()) {
    const auto plain = cost_of(c.call, c.inputs);
    const auto wrapped = cost_of(c.call, distributed(c.inputs));
    EXPECT_EQ(wrapped.objects, plain.objects + c.wrappers) << c.name;
    EXPECT_EQ(wrapped.storages, plain.storages) << c.name;
  }
}

TEST(DispatchCache, FindsARepeatedCall) {
  const auto x = distributed({at::rand({3, 5})})[0];
  clear_dispatch_cache();
  const auto before = detail::dispatch_cache_statistics();
  EXPECT_EQ(before.plans, 0u);
  at::cosh(x);
  at::cosh(x);
  const auto after = detail::dispatch_cache_statistics();
  EXPECT_EQ(after.misses - before.misses, 1u);
  EXPECT_EQ(after.hits - before.hits, 1u);
  EXPECT_EQ(after.plans, 1u);
}

TEST(DispatchCache, StoresNoCallsOfPlainTensors) {
  const detail::MetaFactoryGuard sends_plain_calls_too;
  const auto before = detail::dispatch_cache_statistics();
  at::cosh(at::zeros({3, 5}));
  EXPECT_EQ(detail::dispatch_cache_statistics().misses, before.misses);
}

TEST(DispatchCache, StaysWithinItsCapacity) {
  const auto calls = 3 * static_cast<std::int64_t>(detail::dispatch_cache_statistics().capacity);
  const auto x = distributed({at::rand({2})})[0];
  const auto expand = [&](std::int64_t size) { return x.expand({size, 2}); };
  for (std::int64_t size = 1; size <= calls; ++size) {
    expand(size);
  }
  const auto full = detail::dispatch_cache_statistics();
  EXPECT_LE(full.plans, full.capacity);
  EXPECT_GT(full.plans, full.capacity / 2);
  expand(calls);
  EXPECT_EQ(detail::dispatch_cache_statistics().hits, full.hits + 1);
}

}  // namespace
}  // namespace tessera
