// Devices, their allocators and the profiler.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

// Queries on a device of any kind, for a program that does not link the device's libraries:
// libtorch_cuda registers its implementations with libtorch_cpu when it is loaded. The public
// functions are CUDA's, in c10_cuda.
//
// Canary: DevicesCanary.

/// The index of the device that this thread uses.
c10::DeviceIndex current_device(c10::DeviceType type);
/// Waits for all work on the device.
void synchronize(c10::Device device);

/// The memory that libtorch's caching allocator has on a device.
struct CachedMemory {
  /// Maximum of reserved bytes, which limits how much larger a batch can be.
  std::int64_t peak_reserved = 0;
  std::int64_t peak_active = 0;  ///< maximum of bytes in use: the memory that the program needs
};
/// The maxima since the last call of this function, over all kinds of blocks.
CachedMemory take_cached_memory(c10::Device device);
/// The total memory of the device in bytes. The calling thread waits for the device's answer.
std::int64_t memory_capacity(c10::Device device);
/// Returns unused cached memory to the driver.
void empty_cache(c10::DeviceType type);

// Whether libtorch has found its CUDA part, and with which cuDNN. libtorch checks once, for example
// at the first backward on a CPU, and stores the result; torch::cuda::is_available() would start
// this check.
//
// Canary: CudaPresenceCanary.

bool has_found_cuda();

struct CudnnVersions {
  int built_with = 0;
  int loaded = 0;
};
/// The cuDNN versions (see CudnnVersions); nullopt if libtorch has no cuDNN.
std::optional<CudnnVersions> cudnn_versions();

// Replaces libtorch's allocator for the CPU. Deriving from c10::Allocator is public. Setting an
// allocator for the process is a function that libtorch exports without documentation.
//
// Canary: CpuAllocatorCanary.

c10::Allocator* cpu_allocator();
/// Sets libtorch's CPU allocator permanently: tensors may outlive main(), so `allocator` must exist
/// until the process ends.
void set_cpu_allocator(c10::Allocator* allocator);

// libtorch's profiler of operators and kernels, which torch.profiler uses in Python. In C++ only
// the legacy profiler has a class.
//
// Canary: KernelProfilerCanary.

/// Whether a profile is being recorded. A process records at most one, including profiles started
/// in Python.
bool profiler_runs();
/// Starts a profile. `gpu`: whether to record the GPU's kernels too.
void begin_profile(bool gpu);
/// Ends the profile and drops it.
void drop_profile();
/// Ends the profile and writes it to a file as a Chrome trace. Errors are not reported.
void save_profile(const std::string& file);

}  // namespace tessera::detail
TESSERA_API_END
