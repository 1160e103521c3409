#include "tessera/core/detail/crc32c.h"

#include <array>

#include "crc32c/ways.h"

namespace tessera::detail {
namespace {

/// What a byte does to the sum.
constexpr std::array<std::uint32_t, 256> kCrcTable = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = times_x(crc);
    }
    table[byte] = crc;
  }
  return table;
}();

}  // namespace

std::uint32_t crc32c_by_table(std::span<const std::byte> bytes, std::uint32_t before) {
  std::uint32_t crc = ~before;
  for (const std::byte byte : bytes) {
    crc = (crc >> 8) ^ kCrcTable[(crc ^ static_cast<std::uint32_t>(byte)) & 0xffU];
  }
  return ~crc;
}

std::vector<Crc32cWay> crc32c_ways() {
  std::vector<Crc32cWay> ways;
#if defined(__x86_64__)
  const bool instruction = __builtin_cpu_supports("sse4.2") != 0;
  const bool products = instruction && __builtin_cpu_supports("pclmul") != 0;
  if (products && __builtin_cpu_supports("avx512f") != 0 &&
      __builtin_cpu_supports("vpclmulqdq") != 0) {
    ways.push_back({"products", crc32c_by_products});
  }
  if (products && __builtin_cpu_supports("avx") != 0) {
    ways.push_back({"both", crc32c_by_both});
  }
  if (instruction) {
    ways.push_back({"instruction", crc32c_by_instruction});
  }
#endif
  ways.push_back({"table", crc32c_by_table});
  return ways;
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before) {
  static const auto sum = crc32c_ways().front().sum;
  return sum(bytes, before);
}

}  // namespace tessera::detail
