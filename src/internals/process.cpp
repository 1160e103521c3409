#include <ATen/autocast_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <set>
#include <string_view>
#include <typeinfo>

#include "tessera/internals/detail/devices.h"
#include "tessera/internals/detail/threads.h"

namespace tessera::detail {
namespace {

constexpr std::array kCastDevices{c10::kCPU, c10::kCUDA};

}  // namespace

AutocastState autocast_state() {
  return {{at::autocast::get_autocast_dtype(kCastDevices[0]),
           at::autocast::get_autocast_dtype(kCastDevices[1])},
          at::autocast::is_autocast_cache_enabled()};
}

void set_autocast_state(const AutocastState& state) {
  for (std::size_t i = 0; i < kCastDevices.size(); ++i) {
    at::autocast::set_autocast_dtype(kCastDevices[i], state.types[i]);
  }
  at::autocast::set_autocast_cache_enabled(state.keeps_casts);
}

bool autocasts(c10::DeviceType device) {
  // libtorch throws for a device without autocast, such as meta, so `device` is checked first.
  return std::ranges::find(kCastDevices, device) != kCastDevices.end() &&
         at::autocast::is_autocast_enabled(device);
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13

c10::DebugInfoKind kind_of(Carried what) {
  constexpr int kFirst = 128;  // first unused value: larger than every DebugInfoKind of libtorch
  return static_cast<c10::DebugInfoKind>(kFirst + static_cast<int>(what));
}

#else

c10::DebugInfoKind kind_of(Carried what) {
  static constexpr std::array<std::string_view, 4> kNames{
      "tessera::Strict", "tessera::OperatorMode", "tessera::RandomRegion", "tessera::MemoryScope"};
  return c10::DebugInfoKind(&kNames[static_cast<std::size_t>(what)]);
}

#endif

c10::DeviceIndex current_device(c10::DeviceType type) {
  return c10::impl::VirtualGuardImpl(type).getDevice().index();
}

void synchronize(c10::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

CachedMemory take_cached_memory(c10::Device device) {
  c10::DeviceAllocator& allocator = *c10::getDeviceAllocator(device.type());
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = allocator.getDeviceStats(device.index());
  allocator.resetPeakStats(device.index());
  return {stats.reserved_bytes[kAll].peak, stats.active_bytes[kAll].peak};
}

std::int64_t memory_capacity(c10::Device device) {
  return static_cast<std::int64_t>(
      c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index()).second);
}

void empty_cache(c10::DeviceType type) {
  c10::getDeviceAllocator(type)->emptyCache();
}

bool has_found_cuda() {
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  return typeid(hooks) != typeid(at::CUDAHooksInterface);
}

std::optional<CudnnVersions> cudnn_versions() {
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  if (!hooks.hasCuDNN()) {
    return std::nullopt;
  }
  return CudnnVersions{static_cast<int>(hooks.versionCuDNN()),
                       static_cast<int>(hooks.versionRuntimeCuDNN())};
}

c10::Allocator* cpu_allocator() {
  return c10::GetCPUAllocator();
}

void set_cpu_allocator(c10::Allocator* allocator) {
  c10::SetCPUAllocator(allocator, /*priority=*/255);
}

namespace profiler = torch::autograd::profiler;

bool profiler_runs() {
  return profiler::profilerEnabled();
}

void begin_profile(bool gpu) {
  std::set<profiler::ActivityType> activities{profiler::ActivityType::CPU};
  if (gpu) {
    activities.insert(profiler::ActivityType::CUDA);
  }
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
}

void drop_profile() {
  profiler::disableProfiler();
}

void save_profile(const std::string& file) {
  profiler::disableProfiler()->save(file);
}

}  // namespace tessera::detail
