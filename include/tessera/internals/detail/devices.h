// Queries on a device of any kind, for a program that does not link its libraries: libtorch_cuda
// registers the answers with libtorch_cpu when it is loaded. The public functions are CUDA's, in
// c10_cuda.
//
// No version differs in what is used.
//
// Canary: DevicesCanary.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// That this thread uses.
c10::DeviceIndex current_device(c10::DeviceType type);
c10::Stream current_stream(c10::Device device);
/// Waits for all that was started on it.
void synchronize(c10::Device device);

/// What libtorch's caching allocator has of a device.
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

}  // namespace tessera::detail
TESSERA_API_END
