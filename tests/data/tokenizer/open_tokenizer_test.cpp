#include <gtest/gtest.h>

#include "data/tokenizer/small_tokenizers.h"
#include "testing/errors.h"

namespace tessera::data {
namespace {

using Ids = std::vector<std::int64_t>;

TEST(TiktokenTokenizer, MergesByTheRankOfTheResult) {
  const testing::TemporaryFolder folder;
  testing::WriteFile(folder / "tokenizer.model", testing::TiktokenLines());
  const auto tokenizer = tiktoken_tokenizer(folder / "tokenizer.model", TiktokenModel::kLlama3);
  EXPECT_EQ(tokenizer->encode("abb a"), (Ids{2, 1, 3, 0}));
  EXPECT_EQ(tokenizer->decode({2, 1, 3, 0}), "abb a");
  // Llama 3 has 256 special tokens behind the others.
  EXPECT_EQ(tokenizer->vocabulary(), 4 + 256);
  EXPECT_EQ(tokenizer->begin_tokens(), Ids{4});
  EXPECT_EQ(tokenizer->end_tokens(), Ids{5});
  EXPECT_EQ(tokenizer->encode("a<|eot_id|>"), (Ids{0, 4 + 9}));
}

TEST(TiktokenTokenizer, HasThePatternAndTheSpecialTokensOfLlama4) {
  const testing::TemporaryFolder folder;
  // a, A, b, aA, Ab
  testing::WriteFile(folder / "tokenizer.model", "YQ== 0\nQQ== 1\nYg== 2\nYUE= 3\nQWI= 4\n");
  const auto tokenizer = tiktoken_tokenizer(folder / "tokenizer.model", TiktokenModel::kLlama4);
  // A capital begins a word; of Llama 3 it doesn't.
  EXPECT_EQ(tokenizer->encode("aAb"), (Ids{0, 4}));
  EXPECT_EQ(tiktoken_tokenizer(folder / "tokenizer.model", TiktokenModel::kLlama3)->encode("aAb"),
            (Ids{3, 2}));
  EXPECT_EQ(tokenizer->vocabulary(), 5 + 2048);
  EXPECT_EQ(tokenizer->begin_tokens(), Ids{5});
  EXPECT_EQ(tokenizer->end_tokens(), Ids{6});
  EXPECT_EQ(tokenizer->encode("<|eot|><|patch|><|reasoning_thinking_end|>"),
            (Ids{5 + 8, 5 + 92, 5 + 1143}));
}

TEST(TiktokenTokenizer, NamesTheLineThatIsWrong) {
  const testing::TemporaryFolder folder;
  const auto file = folder / "tokenizer.model";
  for (const char* line : {"Yg== 2", "Yg= 1", "Y*== 1", "Yg==", " 1"}) {
    SCOPED_TRACE(line);
    testing::WriteFile(file, std::string("YQ== 0\n") + line + "\n");
    EXPECT_ERROR(tiktoken_tokenizer(file), "line 2 is not a token in base64 and the rank 1",
                 "tokenizer.model");
  }
  testing::WriteFile(file, "YQ== 0\nYQ== 1\n");
  EXPECT_ERROR(tiktoken_tokenizer(file, TiktokenModel::kLlama3),
               "the token of rank 1 is there twice");
  testing::WriteFile(file, "YQ== 0\r\nYg== 1\r\n");
  EXPECT_ERROR(open_tokenizer(file), "line 1 ends with CRLF", "tokenizer.model");
}

TEST(TiktokenTokenizer, RefusesTheFilesOfOtherModels) {
  const testing::TemporaryFolder folder;
  testing::WriteFile(folder / "tokenizer.model", testing::TiktokenLines());
  EXPECT_ERROR(tiktoken_tokenizer(folder / "tokenizer.model"),
               "it has 4 tokens (Llama 3's has 128000, Llama 4's has 200000): of another model",
               "tokenizer.model");
}

TEST(TiktokenTokenizer, RefusesTokensWhoseMergesTakeTooLong) {
  const testing::TemporaryFolder folder;
  const auto file = folder / "tokenizer.model";
  testing::WriteFile(file, std::string(1336, 'A') + " 0\n");  // 1002 bytes
  EXPECT_ERROR(tiktoken_tokenizer(file), "line 1 is not a token");
  std::string lines;
  for (int rank = 0; rank < 1100; ++rank) {
    lines += std::string(1332, 'A') + " " + std::to_string(rank) + "\n";  // 999 bytes
  }
  testing::WriteFile(file, lines);
  EXPECT_ERROR(tiktoken_tokenizer(file), "up to line 1003 are longer than any tokenizer's");
}

TEST(OpenTokenizer, TellsTheFormByTheContent) {
  const testing::TemporaryFolder folder;
  testing::WriteFile(folder / "one", testing::TiktokenLines());
  testing::WriteFile(folder / "two", "\n" + testing::ByteLevelJson().dump(2));
  testing::WriteFile(folder / "three", "a text");
  EXPECT_ERROR(open_tokenizer(folder / "one"), "has 4 tokens (Llama 3's has 128000");
  EXPECT_EQ(open_tokenizer(folder / "two")->vocabulary(), 8);
  EXPECT_ERROR(open_tokenizer(folder / "three"), "three");
  EXPECT_ERROR(open_tokenizer(folder / "four"), "four");
}

TEST(OpenTokenizer, NamesAByteOrderMark) {
  const testing::TemporaryFolder folder;
  testing::WriteFile(folder / "one", "\xef\xbb\xbf" + testing::ByteLevelJson().dump());
  EXPECT_ERROR(open_tokenizer(folder / "one"), "begins with a byte order mark", "one");
}

TEST(OpenTokenizer, PrefersTheJsonOfAFolder) {
  const testing::TemporaryFolder folder;
  EXPECT_ERROR(open_tokenizer(folder.path()), "has no tokenizer.json and no tokenizer.model");
  testing::WriteFile(folder / "tokenizer.model", testing::TiktokenLines());
  EXPECT_ERROR(open_tokenizer(folder.path()), "tokenizer.model", "has 4 tokens");
  testing::WriteFile(folder / "tokenizer.json", testing::ByteLevelJson().dump());
  EXPECT_EQ(open_tokenizer(folder.path())->vocabulary(), 8);
}

}  // namespace
}  // namespace tessera::data
