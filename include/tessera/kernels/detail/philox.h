#pragma once

#include <cstdint>

#include "tessera/export.h"

#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif

TESSERA_API_BEGIN
namespace tessera::kernels {

/// Selects a random number sequence: a Philox key (seed), and half of Philox's counter (stream).
struct PhiloxKey {
  std::uint64_t seed;
  std::uint64_t stream;
};

/// A counter of Philox4x32, or its output: 128 bits.
struct PhiloxBlock {
  std::uint32_t words[4];
};

/// Computes Philox4x32-10 (Salmon et al. 2011): 128 random bits as a pure function of a 128-bit
/// counter and a 64-bit key.
TESSERA_HOST_DEVICE inline PhiloxBlock philox4x32_10(PhiloxBlock counter, std::uint32_t key0,
                                                     std::uint32_t key1) {
  std::uint32_t c0 = counter.words[0];
  std::uint32_t c1 = counter.words[1];
  std::uint32_t c2 = counter.words[2];
  std::uint32_t c3 = counter.words[3];
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * c0;
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57U} * c2;
    c0 = static_cast<std::uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<std::uint32_t>(product1);
    c2 = static_cast<std::uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<std::uint32_t>(product0);
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
  return {{c0, c1, c2, c3}};
}

/// Returns a random number, one of 2^52 equally spaced numbers in (0, 1). The key is the seed, and
/// the counter is (index, stream). This function must never change, so that a seed gives the same
/// weights in all versions.
TESSERA_HOST_DEVICE inline double uniform_at(std::uint64_t seed, std::uint64_t stream,
                                             std::uint64_t index) {
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  const PhiloxBlock block =
      philox4x32_10({{low(index), high(index), low(stream), high(stream)}}, low(seed), high(seed));
  const std::uint64_t bits = (std::uint64_t{block.words[1]} << 32 | block.words[0]) >> 12;
  return (static_cast<double>(bits) + 0.5) * 0x1p-52;
}

}  // namespace tessera::kernels
TESSERA_API_END
