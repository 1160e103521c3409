#pragma once

#include <cstdint>
#include <string>

namespace tessera::observe {

/// What a device of a type ("cpu", "cuda") calls itself; the current one where there are several.
/// "" if it can't be found out.
std::string device_name(const std::string& device_type);

struct MemoryUse {
  std::int64_t peak_bytes = 0;      ///< cpu: resident, of this process; cuda: reserved by libtorch
  std::int64_t capacity_bytes = 0;  ///< of the machine, or of the device; 0: not known
};
/// Highest use so far.
MemoryUse memory_use(const std::string& device_type);

/// Peak resident memory of this process, bytes.
std::int64_t peak_resident_bytes();
/// Physical memory of this machine, bytes.
std::int64_t physical_memory_bytes();

}  // namespace tessera::observe
