#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// CRC-32C (Castagnoli; RFC 3720), as in iSCSI, ext4 and btrfs, by the processor's fastest method.
/// `before`: the checksum of the preceding bytes, so that a checksum can be computed in pieces.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0);

/// A method of computing CRC-32C, with its name.
struct Crc32cWay {
  const char* name;
  std::uint32_t (*sum)(std::span<const std::byte> bytes, std::uint32_t before);
};

/// The methods that this processor supports, the fastest first. The last method uses a table and
/// works on every processor.
std::vector<Crc32cWay> crc32c_ways();

}  // namespace tessera::detail
TESSERA_API_END
