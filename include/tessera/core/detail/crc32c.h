#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// The CRC-32C (Castagnoli; RFC 3720) of bytes, as iSCSI, ext4 and btrfs compute it. `before`: the
/// CRC-32C of the preceding bytes, to sum a file piece by piece. Uses the instruction of SSE 4.2 if
/// the processor has it, else a table.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0);
/// The same, from the table.
std::uint32_t crc32c_by_table(std::span<const std::byte> bytes, std::uint32_t before = 0);

}  // namespace tessera::detail
TESSERA_API_END
