#include "tessera/core/detail/crc32c.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tessera::detail {
namespace {

constexpr auto kWays = {crc32c, crc32c_by_table};

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

TEST(Crc32c, IsThatOfTheStandard) {
  std::string rising;
  for (char c = 0; c < 32; ++c) {
    rising.push_back(c);
  }
  for (const auto& sum : kWays) {
    EXPECT_EQ(sum(bytes_of(""), 0), 0U);
    EXPECT_EQ(sum(bytes_of("123456789"), 0), 0xe3069283U);
    // RFC 3720, B.4.
    EXPECT_EQ(sum(bytes_of(std::string(32, '\0')), 0), 0x8a9136aaU);
    EXPECT_EQ(sum(bytes_of(std::string(32, '\xff')), 0), 0x62a8ab43U);
    EXPECT_EQ(sum(bytes_of(rising), 0), 0x46dd794eU);
  }
}

TEST(Crc32c, IsThatOfTheDefinitionForEverySizeAndCut) {
  std::string text;
  std::vector<std::uint32_t> expected{7};  // of the first n bytes, bit by bit
  std::uint32_t crc = ~7U;
  for (unsigned i = 0; i < 4096; ++i) {
    text.push_back(static_cast<char>(i * i / 7));
    crc ^= static_cast<std::uint8_t>(text.back());
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1U) != 0 ? 0x82f63b78U : 0);
    }
    expected.push_back(~crc);
  }
  for (const auto& sum : kWays) {
    for (std::size_t size = 0; size <= text.size(); ++size) {
      const auto first = bytes_of(text).first(size);
      ASSERT_EQ(sum(first, 7), expected[size]) << size;
      ASSERT_EQ(sum(first.subspan(size / 3), sum(first.first(size / 3), 7)), expected[size]);
    }
  }
}

}  // namespace
}  // namespace tessera::detail
