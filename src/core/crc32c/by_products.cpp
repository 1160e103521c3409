// V. Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction (Intel,
// 2009): bytes that lie n bits before others are replaced by 128 bits at the others' place that
// have the same remainder, the product of theirs and of x^n modulo the polynomial.

#include "crc32c/ways.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <iterator>

namespace tessera::detail {
namespace {

constexpr std::size_t kBlockBytes = 64;  ///< size of a register: four lanes of 128 bits
/// As many as hide how long a product takes.
constexpr std::size_t kBlocks = 8;

constexpr std::uint32_t power_of_x(std::size_t exponent) {
  std::uint32_t power = 0x80000000;
  for (std::size_t i = 0; i < exponent; ++i) {
    power = times_x(power);
  }
  return power;
}

/// What moves a lane on by `kBits`: a factor for each half. The first half of the bytes has the
/// higher powers, 64 more. A product of two halves in this order of bits is one power too high, and
/// a factor in the lower 32 bits of its half 32.
template <std::size_t kBits>
struct Factors {
  static constexpr std::uint32_t kFirst = power_of_x(kBits + 64 - 33);
  static constexpr std::uint32_t kSecond = power_of_x(kBits - 33);

  __attribute__((target("avx512f"))) static __m512i of_lanes() {
    return _mm512_set4_epi64(kSecond, kFirst, kSecond, kFirst);
  }
};

__attribute__((target("avx512f"))) __m512i block_at(const std::byte* bytes) {
  return _mm512_loadu_si512(bytes);
}

/// Each lane of `block` moved on to that of `to`.
__attribute__((target("avx512f,vpclmulqdq"))) inline __m512i moved(__m512i block, __m512i factors,
                                                                   __m512i to) {
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(block, factors, 0x00),
                                   _mm512_clmulepi64_epi128(block, factors, 0x11), to, kXorOfThree);
}

/// The register after the four lanes.
__attribute__((target("avx512f,pclmul,sse4.2"))) std::uint32_t sum_of_lanes(__m512i block) {
  __m128i lanes[4];
  _mm512_storeu_si512(lanes, block);
  const __m128i by_lane = _mm_set_epi64x(Factors<128>::kSecond, Factors<128>::kFirst);
  __m128i sum = lanes[0];
  for (std::size_t i = 1; i < std::size(lanes); ++i) {
    sum = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(sum, by_lane, 0x00),
                                      _mm_clmulepi64_si128(sum, by_lane, 0x11)),
                        lanes[i]);
  }
  const auto first = static_cast<std::uint64_t>(_mm_cvtsi128_si64(sum));
  const auto second = static_cast<std::uint64_t>(_mm_extract_epi64(sum, 1));
  return static_cast<std::uint32_t>(_mm_crc32_u64(_mm_crc32_u64(0, first), second));
}

/// The register after a multiple of kBlockBytes, at least kBlocks of them, where it was `crc`.
__attribute__((target("avx512f,vpclmulqdq"))) std::uint32_t sum_of_blocks(
    std::span<const std::byte> bytes, std::uint32_t crc) {
  constexpr std::size_t kAtOnce = kBlocks * kBlockBytes;
  const __m512i by_all = Factors<8 * kAtOnce>::of_lanes();
  const __m512i by_block = Factors<8 * kBlockBytes>::of_lanes();
  __m512i sums[kBlocks];
  for (std::size_t i = 0; i < kBlocks; ++i) {
    sums[i] = block_at(bytes.data() + i * kBlockBytes);
  }
  sums[0] = _mm512_xor_si512(
      sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<std::int32_t>(crc))));
  bytes = bytes.subspan(kAtOnce);
  for (; bytes.size() >= kAtOnce; bytes = bytes.subspan(kAtOnce)) {
    for (std::size_t i = 0; i < kBlocks; ++i) {
      sums[i] = moved(sums[i], by_all, block_at(bytes.data() + i * kBlockBytes));
    }
  }
  __m512i sum = sums[0];
  for (std::size_t i = 1; i < kBlocks; ++i) {
    sum = moved(sum, by_block, sums[i]);
  }
  for (; !bytes.empty(); bytes = bytes.subspan(kBlockBytes)) {
    sum = moved(sum, by_block, block_at(bytes.data()));
  }
  return sum_of_lanes(sum);
}

}  // namespace

std::uint32_t crc32c_by_products(std::span<const std::byte> bytes, std::uint32_t before) {
  const std::size_t in_blocks = bytes.size() / kBlockBytes * kBlockBytes;
  if (in_blocks >= kBlocks * kBlockBytes) {
    before = ~sum_of_blocks(bytes.first(in_blocks), ~before);
    bytes = bytes.subspan(in_blocks);
  }
  return crc32c_by_instruction(bytes, before);
}

}  // namespace tessera::detail

#endif
