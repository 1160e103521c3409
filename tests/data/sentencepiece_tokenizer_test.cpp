#include "tessera/data/tokenizer.h"

#include <gtest/gtest.h>

#include <cstring>

#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::data {
namespace {

/// A protobuf field of bytes (all shorter than 128).
std::string Field(char number, const std::string& bytes) {
  return std::string{static_cast<char>(number << 3 | 2), static_cast<char>(bytes.size())} + bytes;
}

/// One entry of a SentencePiece model: piece, score, type (1 normal, 2 unknown, 3 control).
std::string Piece(const std::string& piece, float score, char type) {
  std::string number(4, '\0');
  std::memcpy(number.data(), &score, 4);
  return Field(1, Field(1, piece) + '\x15' + number + '\x18' + type);
}

/// Words of a and bc; "\xe2\x96\x81" is SentencePiece's mark of a word's begin.
std::string SmallModel() {
  return Piece("<unk>", 0, 2) + Piece("<s>", 0, 3) + Piece("</s>", 0, 3) +
         Piece(
             "\xe2\x96\x81"
             "a",
             -1, 1) +
         Piece(
             "\xe2\x96\x81"
             "b",
             -2, 1) +
         Piece("c", -3, 1);
}

TEST(SentencePieceTokenizer, NamesAMissingFile) {
  EXPECT_THAT_ERROR(sentencepiece_tokenizer("/nowhere/tokenizer.model"), "tokenizer.model");
}

TEST(SentencePieceTokenizer, RefusesAnotherFile) {
  testing::TemporaryFolder folder;
  testing::WriteFile(folder / "tokenizer.model", "not a model");
  EXPECT_THAT_ERROR(sentencepiece_tokenizer(folder / "tokenizer.model"), "tokenizer.model");
}

TEST(SentencePieceTokenizer, EncodesAndDecodes) {
  testing::TemporaryFolder folder;
  testing::WriteFile(folder / "tokenizer.model", SmallModel());
  const auto tokenizer = sentencepiece_tokenizer(folder / "tokenizer.model");
  EXPECT_EQ(tokenizer->vocabulary(), 6);
  EXPECT_EQ(tokenizer->encode("a bc a"), (std::vector<std::int64_t>{3, 4, 5, 3}));
  EXPECT_EQ(tokenizer->decode({3, 4, 5, 3}), "a bc a");
  EXPECT_EQ(tokenizer->begin_token(), 1);
  EXPECT_EQ(tokenizer->end_token(), 2);
}

TEST(SentencePieceTokenizer, RefusesATokenOutsideItsVocabulary) {
  testing::TemporaryFolder folder;
  testing::WriteFile(folder / "tokenizer.model", SmallModel());
  const auto tokenizer = sentencepiece_tokenizer(folder / "tokenizer.model");
  EXPECT_THAT_ERROR(tokenizer->decode({6}), "token 6 is outside");
  EXPECT_THAT_ERROR(tokenizer->decode({-1}), "token -1 is outside");
}

}  // namespace
}  // namespace tessera::data
