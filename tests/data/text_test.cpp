#include "tessera/data/text.h"

#include <gtest/gtest.h>

#include <cmath>

#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::data {
namespace {

TEST(ReadText, KeepsEveryByte) {
  testing::TemporaryFolder folder;
  const std::string bytes("a\0\r\n\xff", 5);
  testing::WriteFile(folder / "text", bytes);
  EXPECT_EQ(read_text(folder / "text"), bytes);
}

TEST(ReadText, ReadsAnEmptyFile) {
  testing::TemporaryFolder folder;
  testing::WriteFile(folder / "text", "");
  EXPECT_EQ(read_text(folder / "text"), "");
}

TEST(ReadText, NamesAMissingFile) {
  testing::TemporaryFolder folder;
  EXPECT_ERROR(read_text(folder / "missing"), "missing");
  EXPECT_ERROR(read_text(folder.path()), "is a folder");
}

TEST(BigramEntropy, IsZeroWhereTheNextByteIsCertain) {
  EXPECT_EQ(bigram_entropy("ababababab"), 0);
  EXPECT_EQ(bigram_entropy("a"), 0);
  EXPECT_EQ(bigram_entropy(""), 0);
}

TEST(BigramEntropy, WeighsEachContextByItsFrequency) {
  // After a: b, c, b, c (ln 2 each); after b and c: a, always. 4 of 8 pairs are uncertain.
  EXPECT_NEAR(bigram_entropy("abacabaca"), std::log(2.0) / 2, 1e-12);
}

}  // namespace
}  // namespace tessera::data
