// Functions of libtorch for devices, their allocators and the profiler.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

// Functions for devices of any type. A registry in libtorch_cpu gives access to a GPU, so programs
// need not link libtorch_cuda. The public functions require c10_cuda.
//
// Canary: DevicesCanary, a test of libtorch itself.

/// Returns the index of this thread's current device.
c10::DeviceIndex current_device(c10::DeviceType type);
/// Waits until all kernels and copies on the device have finished.
void synchronize(c10::Device device);

/// Statistics of libtorch's caching allocator on a device.
struct CachedMemory {
  /// The maximum number of bytes that the allocator has taken from the CUDA driver.
  std::int64_t peak_reserved = 0;
  std::int64_t peak_active = 0;  ///< the maximum number of bytes in use by tensors
};
/// Returns the maximum memory use since the last call.
CachedMemory take_cached_memory(c10::Device device);
/// Returns the total memory of the device in bytes.
std::int64_t memory_capacity(c10::Device device);
/// Frees the allocator's unused cached memory.
void empty_cache(c10::DeviceType type);

// Whether libtorch has found its CUDA library, and the version of cuDNN. These functions read the
// stored result; torch::cuda::is_available() would start the check.
//
// Canary: CudaPresenceCanary, a test of libtorch itself.

bool has_found_cuda();

struct CudnnVersions {
  int built_with = 0;
  int loaded = 0;
};
/// Returns the versions of cuDNN; nullopt if libtorch has no cuDNN.
std::optional<CudnnVersions> cudnn_versions();

// Functions that replace libtorch's allocator for CPU memory. They call c10::SetCPUAllocator, which
// libtorch exports but does not document.
//
// Canary: CpuAllocatorCanary, a test of libtorch itself.

c10::Allocator* cpu_allocator();
/// Sets libtorch's CPU allocator permanently. `allocator` must exist until the process ends,
/// because tensors can outlive main().
void set_cpu_allocator(c10::Allocator* allocator);

// libtorch's profiler of operators and kernels (Kineto; torch.profiler in Python). Only the legacy
// profiler has a public C++ class.
//
// Canary: KernelProfilerCanary, a test of libtorch itself.

/// Returns whether libtorch's profiler is recording. C++ or Python code may have started the
/// profiler. A process records at most one profile at a time.
bool profiler_runs();
/// Starts the profiler. `gpu`: whether to record the GPU's kernels.
void begin_profile(bool gpu);
/// Stops the profiler and discards the profile.
void drop_profile();
/// Stops the profiler and writes the profile to a file as a Chrome trace. Errors are not reported.
void save_profile(const std::string& file);

}  // namespace tessera::detail
TESSERA_API_END
