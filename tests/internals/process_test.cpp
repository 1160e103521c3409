#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>

#include "tessera/internals/detail/c10d.h"
#include "tessera/internals/detail/devices.h"
#include "tessera/internals/detail/threads.h"

namespace tessera::detail {
namespace {

// Canaries (tests that fail if libtorch changes): state of a thread, a device and the process.

TEST(StateOfThreadCanary, CanBeSetOnAnotherThread) {
  const c10::NoGradGuard no_grad;
  const StateOfThread state;
  bool without = false;
  bool with = true;
  std::thread([&] {
    without = c10::GradMode::is_enabled();
    const StateOfThreadScope scope(state);
    with = c10::GradMode::is_enabled();
  }).join();
  EXPECT_TRUE(without);
  EXPECT_FALSE(with);
}

TEST(AutocastStateCanary, SetsTheDtypesOfAutocast) {
  const AutocastState before = autocast_state();
  EXPECT_TRUE(before.keeps_casts);
  set_autocast_state({{at::kHalf, at::kBFloat16}, /*keeps_casts=*/false});
  EXPECT_EQ(autocast_state().types, (std::array{at::kHalf, at::kBFloat16}));
  EXPECT_FALSE(autocast_state().keeps_casts);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  EXPECT_EQ(at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type(), at::kHalf);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  set_autocast_state(before);
  EXPECT_EQ(autocast_state().types, before.types);
}

// A device type that libtorch reserves for extensions.
constexpr auto kLent = c10::DeviceType::PrivateUse1;

int synchronized = 0;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kLent> {
  c10::Device getDevice() const override { return {kLent, 3}; }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override { synchronized += index; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

class Counted final : public c10::DeviceAllocator {
 public:
  Counted() {
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    stats_.reserved_bytes[kAll].peak = 30;
    stats_.active_bytes[kAll].peak = 20;
  }
  c10::DataPtr allocate(std::size_t) override { return {}; }
  void copy_data(void*, const void*, std::size_t) const override {}
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { ++emptied; }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    return stats_;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { stats_ = {}; }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex) override { return {10, 40}; }
  int emptied = 0;

 private:
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

TEST(DevicesCanary, AreSelectedByDeviceType) {
  const c10::Device device(kLent, 3);
  EXPECT_EQ(current_device(kLent), 3);
  synchronize(device);
  EXPECT_EQ(synchronized, 3);
}

TEST(DevicesCanary, ReportAllocatorMemory) {
  static Counted allocator;
  const c10::Device device(kLent, 0);
  c10::SetAllocator(device.type(), &allocator);
  const CachedMemory memory = take_cached_memory(device);
  EXPECT_EQ(memory.peak_reserved, 30);
  EXPECT_EQ(memory.peak_active, 20);
  EXPECT_EQ(take_cached_memory(device).peak_active, 0);
  EXPECT_EQ(memory_capacity(device), 40);
  empty_cache(device.type());
  EXPECT_EQ(allocator.emptied, 1);
}

TEST(CudaPresenceCanary, IsAbsentInACpuProgram) {
  EXPECT_FALSE(has_found_cuda());
  EXPECT_FALSE(cudnn_versions().has_value());
}

TEST(KernelProfilerCanary, WritesTheOperatorsOfAProfile) {
  const auto file = std::filesystem::temp_directory_path() / "tessera_profiler_canary.json";
  EXPECT_FALSE(profiler_runs());
  begin_profile(/*gpu=*/false);
  EXPECT_TRUE(profiler_runs());
  at::mm(at::ones({2, 2}), at::ones({2, 2}));
  save_profile(file.string());
  EXPECT_FALSE(profiler_runs());
  std::ifstream in(file);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  EXPECT_NE(text.find("aten::mm"), std::string::npos);
  std::filesystem::remove(file);
  begin_profile(/*gpu=*/false);
  drop_profile();
  EXPECT_FALSE(profiler_runs());
}

class Forwarding final : public c10::Allocator {
 public:
  explicit Forwarding(c10::Allocator* inner) : inner_(inner) {}
  c10::DataPtr allocate(std::size_t bytes) override {
    ++calls;
    return inner_->allocate(bytes);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  int calls = 0;

 private:
  c10::Allocator* inner_;
};

TEST(CpuAllocatorCanary, AllocatesEveryTensor) {
  c10::Allocator* const before = cpu_allocator();
  Forwarding allocator(before);
  set_cpu_allocator(&allocator);
  EXPECT_EQ(cpu_allocator(), &allocator);
  at::empty({16});
  set_cpu_allocator(before);
  EXPECT_EQ(allocator.calls, 1);
}

// Canary: backward must get the ThreadLocalDebugInfo of the thread that calls backward().

struct Number final : c10::DebugInfoBase {
  explicit Number(int n) : number(n) {}
  int number;
};

int number_in(Carried what) {
  const c10::DebugInfoBase* found = c10::ThreadLocalDebugInfo::get(kind_of(what));
  return found == nullptr ? 0 : static_cast<const Number*>(found)->number;
}

TEST(CarriedSlotCanary, IsSeparateForEachValue) {
  const c10::DebugInfoGuard strict(kind_of(Carried::kStrict), std::make_shared<Number>(1));
  const c10::DebugInfoGuard mode(kind_of(Carried::kOperatorMode), std::make_shared<Number>(2));
  const c10::DebugInfoGuard libtorch(c10::DebugInfoKind::TEST_INFO, std::make_shared<Number>(3));
  EXPECT_EQ(number_in(Carried::kStrict), 1);
  EXPECT_EQ(number_in(Carried::kOperatorMode), 2);
  EXPECT_EQ(number_in(Carried::kMemoryScope), 0);
}

TEST(CarriedSlotCanary, FollowsTheThreadLocalState) {
  const c10::DebugInfoGuard strict(kind_of(Carried::kStrict), std::make_shared<Number>(1));
  const at::ThreadLocalState state;
  int without = -1;
  int with = -1;
  std::thread([&] {
    without = number_in(Carried::kStrict);
    const at::ThreadLocalStateGuard guard(state);
    with = number_in(Carried::kStrict);
  }).join();
  EXPECT_EQ(without, 0);
  EXPECT_EQ(with, 1);
}

// Canaries: c10d's stores, and the Work objects of c10d's process groups (tested with Gloo).

using namespace std::chrono_literals;

/// Turns off libtorch's flight recorder, which has data races between ranks that are threads.
[[maybe_unused]] const int kNoRecord = setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);

TEST(C10dStoreCanary, StoresKeysUnderAPrefix) {
  const StorePtr store = memory_store();
  const StorePtr below = store_below("a", store);
  below->set("key", "value");
  EXPECT_TRUE(store->check({"a/key"}));
  EXPECT_FALSE(store->check({"key"}));
  EXPECT_EQ(below->get_to_str("key"), "value");
  EXPECT_EQ(below->add("count", 2), 2);
  EXPECT_EQ(below->clone()->add("count", 1), 3);
}

TEST(C10dStoreCanary, RecognizesAMemoryStoreUnderPrefixes) {
  const StorePtr store = memory_store();
  EXPECT_TRUE(is_in_memory(store));
  EXPECT_TRUE(is_in_memory(store_below("a", store_below("b", store))));
}

TEST(C10dStoreCanary, SharesKeysBetweenServerAndClients) {
  constexpr std::uint16_t kAny = 0;
  const StorePtr server =
      connect_store({.address = "127.0.0.1", .port = kAny, .serves = true, .timeout = 10s});
  EXPECT_NE(port_of(server), kAny);
  server->set("key", "value");
  const StorePtr same = server->clone();
  EXPECT_EQ(same->get_to_str("key"), "value");
  EXPECT_EQ(same->add("count", 1), 1);
  EXPECT_EQ(server->add("count", 1), 2);
}

TEST(C10dGroupCanary, ReportsWhetherWorkIsComplete) {
  const StorePtr store = memory_store();
  const auto group_of = [&](int rank) {
    return make_gloo_group(store,
                           {.rank = rank, .size = 2, .timeout = 30s, .address = "127.0.0.1"});
  };
  std::thread late([&] {
    const GroupPtr group = group_of(0);
    std::this_thread::sleep_for(300ms);
    group->barrier()->wait();
  });
  const GroupPtr group = group_of(1);
  const GroupWorkPtr work = group->barrier();
  EXPECT_THROW(work->wait(20ms), std::exception);
  EXPECT_FALSE(work->isCompleted());
  EXPECT_TRUE(work->wait(10s));
  EXPECT_TRUE(work->isCompleted());
  late.join();
}

}  // namespace
}  // namespace tessera::detail
