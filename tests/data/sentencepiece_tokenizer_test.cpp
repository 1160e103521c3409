#include "tessera/data/tokenizer.h"

#include <gtest/gtest.h>

#include "data/small_model.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::data {
namespace {

TEST(SentencePieceTokenizer, NamesAMissingFile) {
  EXPECT_ERROR(sentencepiece_tokenizer("/nowhere/tokenizer.model"), "tokenizer.model");
}

TEST(SentencePieceTokenizer, RefusesAnotherFile) {
  testing::TemporaryFolder folder;
  testing::WriteFile(folder / "tokenizer.model", "not a model");
  EXPECT_ERROR(sentencepiece_tokenizer(folder / "tokenizer.model"), "tokenizer.model");
}

/// For which the library throws.
TEST(SentencePieceTokenizer, RefusesAModelWithAnEmptyPiece) {
  testing::TemporaryFolder folder;
  testing::WriteFile(folder / "tokenizer.model", SmallModel() + Piece("", -4, 1));
  EXPECT_ERROR(sentencepiece_tokenizer(folder / "tokenizer.model"),
               "tokenizer.model' is not a SentencePiece model");
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
  EXPECT_ERROR(tokenizer->decode({6}), "token 6 is outside");
  EXPECT_ERROR(tokenizer->decode({-1}), "token -1 is outside");
}

}  // namespace
}  // namespace tessera::data
