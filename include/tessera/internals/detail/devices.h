// Devices, their allocators and the profiler.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

// Queries on a device of any kind, for a program that does not link its libraries: libtorch_cuda
// registers the answers with libtorch_cpu when it is loaded. The public functions are CUDA's, in
// c10_cuda.
//
// No version differs in what is used.
//
// Canary: DevicesCanary.

/// The stream that this thread uses.
c10::DeviceIndex current_device(c10::DeviceType type);
c10::Stream current_stream(c10::Device device);
/// Waits for all work of the stream.
void synchronize(c10::Device device);

/// The memory that libtorch's caching allocator has on a device.
struct CachedMemory {
  std::int64_t peak_reserved = 0;  ///< the limit for larger batches
  std::int64_t peak_active = 0;    ///< what the program needs
};
/// Peaks since the last call, of all kinds of blocks.
CachedMemory take_cached_memory(c10::Device device);
/// All memory of the device, in bytes. The device waits for the answer.
std::int64_t memory_capacity(c10::Device device);
/// Returns unused memory to the driver.
void empty_cache(c10::DeviceType type);

// Whether libtorch has found its CUDA half, and with which cuDNN. It checks once, at the first
// backward on a CPU for example, and remembers the result: torch::cuda::is_available() would run
// that check.
//
// No version differs.
//
// Canary: CudaPresenceCanary.

bool has_found_cuda();

struct CudnnVersions {
  int built_with = 0;
  int loaded = 0;
};
/// nullopt: libtorch has none.
std::optional<CudnnVersions> cudnn_versions();

// Replaces libtorch's allocator for the CPU. Deriving from c10::Allocator is public. Setting an
// allocator for the process is a function that libtorch exports without documentation.
//
// No version differs.
//
// Canary: CpuAllocatorCanary.

c10::Allocator* cpu_allocator();
/// It cannot be undone: tensors may outlive main(), and so must `allocator`.
void set_cpu_allocator(c10::Allocator* allocator);

// libtorch's profiler of operators and kernels, which torch.profiler uses in Python. In C++ only
// the legacy profiler has a class.
//
// No version differs in what is used.
//
// Canary: KernelProfilerCanary.

/// At most one profile runs in a process, including profiles of Python.
bool profiler_runs();
/// `gpu`: also records the kernels of the GPU.
void begin_profile(bool gpu);
/// Drops the record.
void drop_profile();
/// Writes the record as a Chrome trace, and ends the profile. Errors are not reported.
void save_profile(const std::string& file);

}  // namespace tessera::detail
TESSERA_API_END
