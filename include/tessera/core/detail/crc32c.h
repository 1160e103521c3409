#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// CRC-32C (Castagnoli; RFC 3720), as iSCSI, ext4 and btrfs use it. `before`: that of the bytes in
/// front of these, so that a sum may be taken piece by piece. In the fastest way that the processor
/// has.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0);

/// One of several ways to the same sum.
struct Crc32cWay {
  const char* name;
  std::uint32_t (*sum)(std::span<const std::byte> bytes, std::uint32_t before);
};

/// Those that this processor has, the fastest first; the last is a table, which all have.
std::vector<Crc32cWay> crc32c_ways();

}  // namespace tessera::detail
TESSERA_API_END
