// P. Cawley, Faster CRC32-C on x86 (2022): a core has one unit for the instruction and another for
// products, so one part of the bytes is summed by each at the same time.

#include "crc32c/products.h"

#if defined(__x86_64__)

#include <cstring>

namespace tessera::detail {
namespace {

/// A part of the bytes is what products sum, a block of four lanes first and then one a round, and
/// after it three runs of words for the instruction, which takes three cycles: one of another run
/// can begin in each of them.
constexpr std::size_t kRounds = 240;
constexpr std::size_t kLanesBytes = 64;
constexpr std::size_t kWordsOfRound = 3;  ///< of each run: both units need about nine cycles
constexpr std::size_t kProductsBytes = (kRounds + 1) * kLanesBytes;
constexpr std::size_t kRunBytes = kRounds * kWordsOfRound * sizeof(std::uint64_t);
constexpr std::size_t kPartBytes = kProductsBytes + 3 * kRunBytes;

__m128i lane_at(const std::byte* bytes, std::size_t index) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes) + index);
}

__attribute__((target("sse4.2"))) inline void add_word(std::uint64_t& crc, const std::byte* bytes) {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof(word));
  crc = _mm_crc32_u64(crc, word);
}

/// The register after a run whose own is `run`, where it was `crc` before: moved on as a lane is.
__attribute__((target("pclmul,sse4.2"))) inline std::uint64_t after_run(std::uint64_t crc,
                                                                        std::uint64_t run) {
  constexpr std::uint32_t kFactor = power_of_x(8 * kRunBytes - 33);
  const __m128i product =
      _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<std::int64_t>(crc)),
                           _mm_cvtsi64_si128(static_cast<std::int64_t>(kFactor)), 0x00);
  return _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(product))) ^ run;
}

/// The register after kPartBytes, where it was `crc`. Needs AVX for its instructions of three
/// operands: copies of registers cost a quarter of the speed.
__attribute__((target("avx,pclmul,sse4.2"))) std::uint32_t sum_of_part(const std::byte* bytes,
                                                                       std::uint32_t crc) {
  const __m128i by_round = Factors<8 * kLanesBytes>::of_lane();
  const __m128i before = _mm_cvtsi32_si128(static_cast<std::int32_t>(crc));
  __m128i lanes[4] = {_mm_xor_si128(lane_at(bytes, 0), before), lane_at(bytes, 1),
                      lane_at(bytes, 2), lane_at(bytes, 3)};
  std::uint64_t runs[3] = {};
  const std::byte* words = bytes + kProductsBytes;
  for (std::size_t round = 0; round < kRounds; ++round) {
    bytes += kLanesBytes;
    for (std::size_t i = 0; i < 4; ++i) {
      lanes[i] = moved_lane(lanes[i], by_round, lane_at(bytes, i));
    }
    for (std::size_t i = 0; i < kWordsOfRound; ++i) {
      add_word(runs[0], words);
      add_word(runs[1], words + kRunBytes);
      add_word(runs[2], words + 2 * kRunBytes);
      words += sizeof(std::uint64_t);
    }
  }
  const std::uint64_t first = after_run(sum_of_lanes(lanes), runs[0]);
  return static_cast<std::uint32_t>(after_run(after_run(first, runs[1]), runs[2]));
}

}  // namespace

std::uint32_t crc32c_by_both(std::span<const std::byte> bytes, std::uint32_t before) {
  for (; bytes.size() >= kPartBytes; bytes = bytes.subspan(kPartBytes)) {
    before = ~sum_of_part(bytes.data(), ~before);
  }
  return crc32c_by_instruction(bytes, before);
}

}  // namespace tessera::detail

#endif
