// V. Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction (Intel,
// 2009): bytes that lie n bits before others are replaced by 128 bits at the others' place that
// have the same remainder, the product of theirs and of x^n modulo the polynomial.

#pragma once

#include "crc32c/ways.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace tessera::detail {

constexpr std::uint32_t power_of_x(std::size_t exponent) {
  std::uint32_t power = 0x80000000;
  for (std::size_t i = 0; i < exponent; ++i) {
    power = times_x(power);
  }
  return power;
}

/// What moves a lane of 128 bits on by `kBits`: a factor for each half. The first half of the bytes
/// has the higher powers, 64 more. A product of two halves in this order of bits is one power too
/// high, and a factor in the lower 32 bits of its half 32.
template <std::size_t kBits>
struct Factors {
  static constexpr std::uint32_t kFirst = power_of_x(kBits + 64 - 33);
  static constexpr std::uint32_t kSecond = power_of_x(kBits - 33);

  static __m128i of_lane() { return _mm_set_epi64x(kSecond, kFirst); }
  __attribute__((target("avx512f"))) static __m512i of_lanes() {
    return _mm512_set4_epi64(kSecond, kFirst, kSecond, kFirst);
  }
};

/// `lane` moved on to `to`.
__attribute__((target("pclmul"))) inline __m128i moved_lane(__m128i lane, __m128i factors,
                                                            __m128i to) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(lane, factors, 0x00),
                                     _mm_clmulepi64_si128(lane, factors, 0x11)),
                       to);
}

/// The register after four lanes that follow one another.
__attribute__((target("pclmul,sse4.2"))) inline std::uint32_t sum_of_lanes(
    const __m128i (&lanes)[4]) {
  const __m128i by_lane = Factors<128>::of_lane();
  __m128i sum = lanes[0];
  for (std::size_t i = 1; i < 4; ++i) {
    sum = moved_lane(sum, by_lane, lanes[i]);
  }
  const auto first = static_cast<std::uint64_t>(_mm_cvtsi128_si64(sum));
  const auto second = static_cast<std::uint64_t>(_mm_extract_epi64(sum, 1));
  return static_cast<std::uint32_t>(_mm_crc32_u64(_mm_crc32_u64(0, first), second));
}

}  // namespace tessera::detail

#endif
