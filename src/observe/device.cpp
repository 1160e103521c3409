// The machine and its used memory, for metrics and MFU. "" or 0 if unknown: a run must not fail for
// its metrics.
#include "tessera/observe/device.h"

#include <dlfcn.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <fstream>

#include "tessera/internals/detail/devices.h"
#include "tessera/observe/tensor_memory.h"

namespace tessera::observe {
namespace {

c10::Device current_cuda_device() {
  return {c10::DeviceType::CUDA, detail::current_device(c10::DeviceType::CUDA)};
}

/// Asks the driver, which a CUDA program has loaded, about the current device: the layer does not
/// link CUDA for that. Declared here as in cuda.h: CUresult and CUdevice are ints, and 0 is
/// success.
template <class... Results>
bool ask_driver(const char* function, Results... results) {
  // RTLD_NOLOAD: only if it is there already.
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) {
    return false;
  }
  const auto get_device = reinterpret_cast<int (*)(int*, int)>(dlsym(driver, "cuDeviceGet"));
  const auto ask = reinterpret_cast<int (*)(Results..., int)>(dlsym(driver, function));
  int device = 0;
  const bool answered = get_device != nullptr && ask != nullptr &&
                        get_device(&device, current_cuda_device().index()) == 0 &&
                        ask(results..., device) == 0;
  dlclose(driver);
  return answered;
}

std::string cuda_name() {
  std::array<char, 256> name{};
  return ask_driver("cuDeviceGetName", name.data(), static_cast<int>(name.size()) - 1) ? name.data()
                                                                                       : "";
}

/// Linux on x86; other processors have no such line.
std::string cpu_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    const auto colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "";
}

/// Asked of the driver once: the question stalls the device. A process has one GPU.
std::int64_t cuda_capacity(c10::Device device) {
  static const std::int64_t bytes = detail::memory_capacity(device);
  return bytes;
}

MemoryUse take_cuda_memory() {
  const c10::Device device = current_cuda_device();
  const detail::CachedMemory memory = detail::take_cached_memory(device);
  return {memory.peak_reserved, memory.peak_active, cuda_capacity(device)};
}

}  // namespace

/// What peak_flops() looks up.
std::string device_name(const std::string& device_type) {
  return device_type == "cuda" ? cuda_name() : cpu_name();
}

int compute_capability() {
  int major = 0, minor = 0;
  return ask_driver("cuDeviceComputeCapability", &major, &minor) ? 10 * major + minor : 0;
}

/// On a CPU of the whole process: ranks that are threads share it.
MemoryUse take_memory_use(const std::string& device_type) {
  if (device_type == "cuda") {
    return take_cuda_memory();
  }
  return {peak_resident_bytes(), take_peak_tensor_bytes(), physical_memory_bytes()};
}

std::int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  // Linux counts in KiB.
  return usage.ru_maxrss * 1024;
}

std::int64_t physical_memory_bytes() {
  return sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
}

}  // namespace tessera::observe
