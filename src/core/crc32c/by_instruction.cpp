#include "crc32c/ways.h"

#if defined(__x86_64__)

#include <nmmintrin.h>

#include <cstring>

namespace tessera::detail {

__attribute__((target("sse4.2"))) std::uint32_t crc32c_by_instruction(
    std::span<const std::byte> bytes, std::uint32_t before) {
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

}  // namespace tessera::detail

#endif
