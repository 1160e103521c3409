// The properties and memory of this machine, for metrics and MFU. Unknown values are "" or 0, so
// that a run does not fail because of its metrics.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <dlfcn.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <fstream>

#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/agreement.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/comm/world.h"
#include "tessera/internals/detail/devices.h"
#include "tessera/observe/detail/memory.h"
#include "tessera/observe/metrics.h"

namespace tessera::observe {
namespace {

c10::Device current_cuda_device() {
  return {c10::DeviceType::CUDA, detail::current_device(c10::DeviceType::CUDA)};
}

/// Calls a function of the CUDA driver for the current device. Returns false without a driver or
/// device. The driver is found at run time, because the observe library does not link CUDA. As in
/// cuda.h, CUresult and CUdevice are ints.
template <class... Results>
bool ask_driver(const char* function, Results... results) {
  // RTLD_NOLOAD finds the driver only if it is already loaded.
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

/// Returns the name of an x86 CPU on Linux; "" on other processors.
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

MemoryUse take_cuda_memory() {
  const c10::Device device = current_cuda_device();
  // The GPU's memory size is cached, because the query stalls the GPU. A process uses one GPU.
  static const std::int64_t capacity = detail::memory_capacity(device);
  const detail::CachedMemory memory = detail::take_cached_memory(device);
  return {memory.peak_reserved, memory.peak_active, capacity};
}

}  // namespace

std::string device_name(const std::string& device_type) {
  if (device_type != "cuda") {
    return cpu_name();
  }
  std::array<char, 256> name{};
  return ask_driver("cuDeviceGetName", name.data(), static_cast<int>(name.size()) - 1) ? name.data()
                                                                                       : "";
}

int compute_capability() {
  int major = 0, minor = 0;
  return ask_driver("cuDeviceComputeCapability", &major, &minor) ? 10 * major + minor : 0;
}

/// On a CPU, the memory numbers include the whole process, even if the ranks are threads of one
/// process.
MemoryUse take_memory_use(const std::string& device_type) {
  if (device_type == "cuda") {
    return take_cuda_memory();
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  // Linux reports ru_maxrss (maximum resident set size) in KiB.
  return {usage.ru_maxrss * 1024, take_peak_tensor_bytes(),
          sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE)};
}

namespace {

/// The duration of one measurement. A machine can have more ranks than cores, so the duration is
/// much longer than the time slice of a scheduler.
constexpr double kWindowSeconds = 0.06;
/// The minimum time of a measured matrix product. Shorter products do not use all cores of a large
/// machine.
constexpr double kProductSeconds = 5e-3;

/// Measures how long matrix products of two square matrices take.
struct SquareProducts {
  at::Tensor a, result;

  SquareProducts(std::int64_t size, c10::Device device, c10::ScalarType type) {
    // The matrices are not zero: with zeros a GPU needs less power and raises its clock rate.
    a = at::arange(size * size, at::device(device).dtype(at::kFloat)).sin_().view({size, size});
    a = a.to(type);
    result = at::empty_like(a);
  }

  double flops() const { return 2 * std::pow(static_cast<double>(a.size(0)), 3); }

  double seconds_of(std::int64_t count) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = Clock::now();
    for (std::int64_t i = 0; i < count; ++i) {
      at::mm_out(result, a, a);
    }
    if (!a.is_cpu()) {
      detail::synchronize(a.device());
    }
    return std::chrono::duration<double>(Clock::now() - start).count();
  }
};

/// Doubles the size of the matrices until a product takes kProductSeconds, up to the maximum size.
SquareProducts fitting_products(c10::Device device, c10::ScalarType type) {
  const std::int64_t most = device.is_cpu() ? 4096 : 8192;
  for (std::int64_t size = 256;; size *= 2) {
    SquareProducts products(size, device, type);
    products.seconds_of(1);  // the first product starts threads and selects a kernel
    if (size == most || products.seconds_of(1) >= kProductSeconds) {
      return products;
    }
  }
}

/// Returns the median FLOP/s of this rank's measurements. All ranks begin to measure together.
double median_rate(comm::Communicator& hosts, c10::Device device, c10::ScalarType type) {
  SquareProducts products = fitting_products(device, type);
  const double wanted = kWindowSeconds / products.seconds_of(1);
  const auto count = static_cast<std::int64_t>(std::clamp(wanted, 1.0, 1000.0));
  comm::gather_on_hosts(hosts, {0});
  std::array<double, 5> rates{};
  for (double& rate : rates) {
    rate = static_cast<double>(count) * products.flops() / products.seconds_of(count);
  }
  std::ranges::nth_element(rates, rates.begin() + rates.size() / 2);
  return rates[rates.size() / 2];
}

}  // namespace

double measure_peak_flops(comm::World& world, c10::ScalarType type) {
  const c10::NoGradGuard no_grad;
  const std::string& name = world.options().device;
  const c10::Device device(c10::Device(name).type(),
                           static_cast<c10::DeviceIndex>(world.device_index()));
  const auto hosts = world.host_group(comm::ranks_of_world(world.size()), "peak FLOP/s");
  const double own = median_rate(*hosts, device, type);
  if (!device.is_cpu()) {
    // The memory counters are reset, because they must not include the memory of measuring FLOP/s.
    detail::empty_cache(device.type());
    take_memory_use(name);
  }
  double sum = 0;
  for (const auto& rate : comm::gather_on_hosts(*hosts, {std::llround(own)})) {
    sum += static_cast<double>(rate.front());
  }
  return sum / world.size();
}

}  // namespace tessera::observe
