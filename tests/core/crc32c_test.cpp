#include "tessera/core/detail/crc32c.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

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

/// The sums of the first n bytes, for each n, computed bit by bit.
std::vector<std::uint32_t> SumsByDefinition(std::span<const std::byte> bytes,
                                            std::uint32_t before) {
  std::vector<std::uint32_t> sums{before};
  std::uint32_t crc = ~before;
  for (const std::byte byte : bytes) {
    crc ^= static_cast<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1U) != 0 ? 0x82f63b78U : 0);
    }
    sums.push_back(~crc);
  }
  return sums;
}

class Crc32cOfText : public ::testing::Test {
 protected:
  Crc32cOfText() {
    for (unsigned i = 0; i < 10'000; ++i) {
      text_.push_back(static_cast<char>(i * i / 7));
    }
  }

  std::span<const std::byte> bytes() const { return std::as_bytes(std::span(text_)); }

 private:
  std::string text_;
};

TEST_F(Crc32cOfText, IsThatOfTheDefinitionForEverySizeAndPlaceInMemory) {
  const auto expected = SumsByDefinition(bytes(), 7);
  for (const Crc32cWay& way : crc32c_ways()) {
    SCOPED_TRACE(way.name);
    for (const std::size_t place : {0, 1, 3, 8, 15, 31, 63}) {
      std::vector<std::byte> memory(place);
      memory.insert(memory.end(), bytes().begin(), bytes().begin() + 4096);
      for (std::size_t size = 0; size <= 4096; ++size) {
        ASSERT_EQ(way.sum(std::span(memory).subspan(place, size), 7), expected[size]) << size;
      }
    }
  }
}

TEST_F(Crc32cOfText, IsTheSameForEveryCut) {
  const std::uint32_t expected = SumsByDefinition(bytes(), 0).back();
  for (const Crc32cWay& way : crc32c_ways()) {
    SCOPED_TRACE(way.name);
    for (std::size_t i = 0; i < 40; ++i) {
      for (const std::size_t cut : {i, 250 * i}) {
        EXPECT_EQ(way.sum(bytes().subspan(cut), way.sum(bytes().first(cut), 0)), expected) << cut;
      }
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
