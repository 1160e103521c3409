#include "tessera/core/detail/crc32c.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace tessera::detail {
namespace {

std::uint32_t SumOf(const Crc32cWay& way, const std::string& text) {
  return way.sum(std::as_bytes(std::span(text)), 0);
}

TEST(Crc32c, IsThatOfTheStandard) {
  std::string rising;
  for (char c = 0; c < 32; ++c) {
    rising.push_back(c);
  }
  for (const Crc32cWay& way : crc32c_ways()) {
    SCOPED_TRACE(way.name);
    EXPECT_EQ(SumOf(way, ""), 0U);
    EXPECT_EQ(SumOf(way, "123456789"), 0xe3069283U);
    // RFC 3720, B.4.
    EXPECT_EQ(SumOf(way, std::string(32, '\0')), 0x8a9136aaU);
    EXPECT_EQ(SumOf(way, std::string(32, '\xff')), 0x62a8ab43U);
    EXPECT_EQ(SumOf(way, rising), 0x46dd794eU);
  }
}

TEST(Crc32c, EveryWayAndEveryCutGiveTheSameSum) {
  std::string text;
  for (unsigned i = 0; i < 40'000; ++i) {  // more than is summed in one go
    text.push_back(static_cast<char>(i * i / 7));
  }
  const auto bytes = std::as_bytes(std::span(text));
  const auto ways = crc32c_ways();
  const auto by_table = ways.back().sum;
  const std::uint32_t expected = by_table(bytes, 0);
  for (const Crc32cWay& way : ways) {
    SCOPED_TRACE(way.name);
    for (std::size_t cut = 0; cut < 40; ++cut) {
      EXPECT_EQ(way.sum(bytes.subspan(cut), way.sum(bytes.first(cut), 0)), expected);
      const auto first = bytes.first(cut * 1000);
      EXPECT_EQ(way.sum(first, 7), by_table(first, 7));
    }
    // Where the blocks of 64 bytes end, and as many of them as go together.
    for (std::size_t size = 0; size < 1300; ++size) {
      ASSERT_EQ(way.sum(bytes.subspan(1, size), 7), by_table(bytes.subspan(1, size), 7)) << size;
    }
  }
}

TEST(Crc32c, UsesTheFastestWay) {
  EXPECT_EQ(std::string(crc32c_ways().back().name), "table");
  const std::string text(5000, 'x');
  EXPECT_EQ(crc32c(std::as_bytes(std::span(text))), SumOf(crc32c_ways().front(), text));
}

}  // namespace
}  // namespace tessera::detail
