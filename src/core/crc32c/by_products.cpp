#include "crc32c/products.h"

#if defined(__x86_64__)

namespace tessera::detail {
namespace {

constexpr std::size_t kBlockBytes = 64;  ///< size of a register: four lanes of 128 bits
/// As many as hide how long a product takes.
constexpr std::size_t kBlocks = 8;

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
  __m128i lanes[4];
  _mm512_storeu_si512(lanes, sum);
  return sum_of_lanes(lanes);
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
