#include "crc32c/ways.h"

#if defined(__x86_64__)

#include <nmmintrin.h>

#include <array>
#include <cstring>

namespace tessera::detail {
namespace {

/// Bytes of each of the three pieces that are summed together: an instruction takes three cycles,
/// and one of another piece can begin in each of them.
constexpr std::size_t kPieceBytes = 4096;

/// The register after kPieceBytes zeros. Linear in the register, and so a table for each of its
/// bytes (as in Mark Adler's crc32c.c).
class ZerosAppended {
 public:
  ZerosAppended() {
    std::array<std::uint32_t, 32> of_bit{};
    for (std::size_t bit = 0; bit < of_bit.size(); ++bit) {
      std::uint32_t crc = std::uint32_t{1} << bit;
      for (std::size_t i = 0; i < 8 * kPieceBytes; ++i) {
        crc = times_x(crc);
      }
      of_bit[bit] = crc;
    }
    for (std::size_t byte = 0; byte < tables_.size(); ++byte) {
      for (std::size_t value = 0; value < 256; ++value) {
        for (std::size_t bit = 0; bit < 8; ++bit) {
          tables_[byte][value] ^= (value >> bit & 1U) != 0 ? of_bit[8 * byte + bit] : 0;
        }
      }
    }
  }

  std::uint32_t operator()(std::uint32_t crc) const {
    return tables_[0][crc & 0xffU] ^ tables_[1][crc >> 8 & 0xffU] ^ tables_[2][crc >> 16 & 0xffU] ^
           tables_[3][crc >> 24];
  }

 private:
  std::array<std::array<std::uint32_t, 256>, 4> tables_{};
};

std::uint64_t word_at(const std::byte* bytes) {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

/// Sums three pieces, one after another in memory.
__attribute__((target("sse4.2"))) std::uint64_t three_pieces(const std::byte* bytes,
                                                             std::uint64_t crc) {
  static const ZerosAppended zeros_appended;
  std::uint64_t second = 0;
  std::uint64_t third = 0;
  for (std::size_t i = 0; i < kPieceBytes; i += sizeof(std::uint64_t)) {
    crc = _mm_crc32_u64(crc, word_at(bytes + i));
    second = _mm_crc32_u64(second, word_at(bytes + kPieceBytes + i));
    third = _mm_crc32_u64(third, word_at(bytes + 2 * kPieceBytes + i));
  }
  const auto two = zeros_appended(static_cast<std::uint32_t>(crc)) ^ second;
  return zeros_appended(static_cast<std::uint32_t>(two)) ^ third;
}

}  // namespace

__attribute__((target("sse4.2"))) std::uint32_t crc32c_by_instruction(
    std::span<const std::byte> bytes, std::uint32_t before) {
  std::uint64_t crc = ~before;
  for (; bytes.size() >= 3 * kPieceBytes; bytes = bytes.subspan(3 * kPieceBytes)) {
    crc = three_pieces(bytes.data(), crc);
  }
  for (; bytes.size() >= sizeof(std::uint64_t); bytes = bytes.subspan(sizeof(std::uint64_t))) {
    crc = _mm_crc32_u64(crc, word_at(bytes.data()));
  }
  auto last = static_cast<std::uint32_t>(crc);
  for (const std::byte byte : bytes) {
    last = _mm_crc32_u8(last, static_cast<std::uint8_t>(byte));
  }
  return ~last;
}

}  // namespace tessera::detail

#endif
