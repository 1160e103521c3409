#include "tessera/kernels/detail/philox.h"

#include <gtest/gtest.h>

#include <array>

namespace tessera::kernels {
namespace {

std::array<std::uint32_t, 4> words(const PhiloxBlock& block) {
  return {block.words[0], block.words[1], block.words[2], block.words[3]};
}

// Known answers of Random123 (kat_vectors, philox4x32 10).
TEST(Philox, AnswersZeros) {
  EXPECT_EQ(words(philox4x32_10({{0, 0, 0, 0}}, 0, 0)),
            (std::array<std::uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
}

TEST(Philox, AnswersOnes) {
  const std::uint32_t f = 0xffffffff;
  EXPECT_EQ(words(philox4x32_10({{f, f, f, f}}, f, f)),
            (std::array<std::uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

TEST(Philox, AnswersDigitsOfPi) {
  EXPECT_EQ(words(philox4x32_10({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822,
                                0x299f31d0)),
            (std::array<std::uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(UniformAt, IsStrictlyBetweenZeroAndOne) {
  for (std::uint64_t i = 0; i < 100'000; ++i) {
    const double u = uniform_at(1, 2, i);
    ASSERT_GT(u, 0.0);
    ASSERT_LT(u, 1.0);
  }
}

TEST(UniformAt, TakesItsBitsFromTheFirstTwoWords) {
  const PhiloxBlock block = philox4x32_10({{5, 1, 7, 2}}, 3, 4);
  const std::uint64_t bits = (std::uint64_t{block.words[1]} << 32 | block.words[0]) >> 12;
  const double expected = (static_cast<double>(bits) + 0.5) / 4503599627370496.0;
  EXPECT_EQ(uniform_at((4ULL << 32) | 3, (2ULL << 32) | 7, (1ULL << 32) | 5), expected);
}

}  // namespace
}  // namespace tessera::kernels
