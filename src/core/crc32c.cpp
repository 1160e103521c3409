// CRC-32C by a table, and by the SSE 4.2 instruction if the processor has it.

#include "tessera/core/detail/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace tessera::detail {
namespace {

/// The polynomial; the coefficient of x^31 is in the lowest bit.
constexpr std::uint32_t kPolynomial = 0x82f63b78;

/// The change of the checksum for each byte value.
constexpr std::array<std::uint32_t, 256> kTable = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1U) != 0 ? kPolynomial : 0);
    }
    table[byte] = crc;
  }
  return table;
}();

std::uint32_t by_table(std::span<const std::byte> bytes, std::uint32_t before) {
  std::uint32_t crc = ~before;
  for (const std::byte byte : bytes) {
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<std::uint32_t>(byte)) & 0xffU];
  }
  return ~crc;
}

#if defined(__x86_64__)
/// Processes eight bytes with each instruction.
__attribute__((target("sse4.2"))) std::uint32_t by_instruction(std::span<const std::byte> bytes,
                                                               std::uint32_t before) {
  std::uint64_t crc = ~before;
  for (; bytes.size() >= sizeof(std::uint64_t); bytes = bytes.subspan(sizeof(std::uint64_t))) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), sizeof(word));
    crc = _mm_crc32_u64(crc, word);
  }
  auto last = static_cast<std::uint32_t>(crc);
  for (const std::byte byte : bytes) {
    last = _mm_crc32_u8(last, static_cast<std::uint8_t>(byte));
  }
  return ~last;
}
#endif

}  // namespace

std::vector<Crc32cWay> crc32c_ways() {
  std::vector<Crc32cWay> ways;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2") != 0) {
    ways.push_back({"instruction", by_instruction});
  }
#endif
  ways.push_back({"table", by_table});
  return ways;
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before) {
  static const auto sum = crc32c_ways().front().sum;
  return sum(bytes, before);
}

}  // namespace tessera::detail
