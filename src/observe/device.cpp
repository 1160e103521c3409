#include "tessera/observe/device.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <fstream>

namespace tessera::observe {
namespace {

int current_cuda_device() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice().index();
}

/// From the driver, which a CUDA program has loaded: the layer does not link CUDA for a name.
std::string cuda_name() {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return "";
  const auto get_device = reinterpret_cast<int (*)(int*, int)>(dlsym(driver, "cuDeviceGet"));
  const auto get_name =
      reinterpret_cast<int (*)(char*, int, int)>(dlsym(driver, "cuDeviceGetName"));
  std::array<char, 256> name{};
  int device = 0;
  const bool found = get_device != nullptr && get_name != nullptr &&
                     get_device(&device, current_cuda_device()) == 0 &&
                     get_name(name.data(), static_cast<int>(name.size()) - 1, device) == 0;
  dlclose(driver);
  return found ? name.data() : "";
}

std::string cpu_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    const auto colon = line.find(": ");
    if (line.starts_with("model name") && colon != line.npos) return line.substr(colon + 2);
  }
  return "";
}

MemoryUse cuda_memory() {
  const auto index = static_cast<c10::DeviceIndex>(current_cuda_device());
  auto* allocator = c10::getDeviceAllocator(c10::DeviceType::CUDA);
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return {allocator->getDeviceStats(index).reserved_bytes[kAll].peak,
          static_cast<std::int64_t>(allocator->getMemoryInfo(index).second)};
}

}  // namespace

std::string device_name(const std::string& device_type) {
  return device_type == "cuda" ? cuda_name() : cpu_name();
}

MemoryUse memory_use(const std::string& device_type) {
  if (device_type == "cuda") return cuda_memory();
  return {peak_resident_bytes(), physical_memory_bytes()};
}

std::int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

std::int64_t physical_memory_bytes() {
  return sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
}

}  // namespace tessera::observe
