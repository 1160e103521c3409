#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::observe {

// What a program runs on. `device_type` is "cpu" or "cuda". Not collective; thread safe.

/// The name of the device, of the current one where there are several; "" if it is not known.
std::string device_name(const std::string& device_type);

/// The current CUDA device's, as a number: 89 for 8.9; 0 if it is not known.
int compute_capability();

/// The memory of one rank, in bytes.
struct MemoryUse {
  std::int64_t peak_bytes = 0;  ///< cpu: resident, of this process; cuda: reserved by libtorch
  /// cuda: the part of what was reserved that tensors had; cpu: what tensors had, if
  /// count_tensor_memory() was called.
  std::optional<std::int64_t> peak_active_bytes;
  std::int64_t capacity_bytes = 0;  ///< of the machine, or of the device; 0: not known
};
/// The highest use of memory since the last call, on a CPU since the process began. Does not wait
/// for the device.
MemoryUse take_memory_use(const std::string& device_type);

/// Peak resident memory of this process, in bytes.
std::int64_t peak_resident_bytes();
/// Physical memory of this machine, in bytes.
std::int64_t physical_memory_bytes();

}  // namespace tessera::observe
TESSERA_API_END
