#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <cstddef>
#include <set>
#include <typeinfo>

#include "tessera/internals/detail/devices.h"

namespace tessera::detail {

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
