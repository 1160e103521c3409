#include "tessera/data/samples.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "testing/errors.h"
#include "testing/files.h"

namespace tessera::data {
namespace {

using testing::TemporaryFolder;
using testing::WriteFile;
using Tokens = std::vector<std::int64_t>;

/// Bytes, but two of the same letter are one token.
class PairTokenizer final : public Tokenizer {
 public:
  std::int64_t vocabulary() const override { return 512; }
  Tokens encode(std::string_view text) const override {
    Tokens tokens;
    for (std::size_t i = 0; i < text.size(); ++i) {
      const bool pair = i + 1 < text.size() && text[i] == text[i + 1];
      tokens.push_back(text[i] + (pair ? 256 : 0));
      i += pair ? 1 : 0;
    }
    return tokens;
  }
  std::string decode(const Tokens& /*tokens*/) const override { return ""; }
};

/// Inputs and targets of a sample of 6 tokens; its end token is 0.
std::pair<Tokens, Tokens> SampleOf(const std::string& line, PromptOptions options = {}) {
  TemporaryFolder folder;
  WriteFile(folder / "p.jsonl", line);
  const auto samples = prompt_completions(folder / "p.jsonl", PairTokenizer(), 6, options);
  std::pair<Tokens, Tokens> sample{Tokens(6), Tokens(6)};
  samples->read(samples->size() - 1, sample.first, sample.second);
  return sample;
}

TEST(PromptCompletions, HaveTargetsInTheCompletionOnly) {
  const auto [inputs, targets] = SampleOf(R"({"prompt": "ab", "completion": "cd"})");
  EXPECT_EQ(inputs, (Tokens{'a', 'b', 'c', 'd', 0, 0}));
  EXPECT_EQ(targets, (Tokens{-100, 'c', 'd', 0, -100, -100}));
}

TEST(PromptCompletions, HaveTargetsInEachCompletionOfAConversation) {
  const PromptOptions options{.begin = {1}, .truncate = true};
  const auto [inputs, targets] =
      SampleOf(R"({"prompt": ["uabA", "du"], "completion": ["cd", "e"]})", options);
  // The two "d" are one token, which covers a border: it belongs to the part behind it.
  EXPECT_EQ(inputs, (Tokens{'u', 'a', 'b', 'A', 'c', 'd' + 256}));
  EXPECT_EQ(targets, (Tokens{-100, -100, -100, 'c', -100, -100}));
}

TEST(PromptCompletions, AreNotBegunNorEndedInAConversation) {
  const auto [inputs, targets] =
      SampleOf(R"({"prompt": ["a", "c"], "completion": ["b", "d"]})", {.begin = {9}, .end = {8}});
  EXPECT_EQ(inputs, (Tokens{'a', 'b', 'c', 8, 8, 8}));
  EXPECT_EQ(targets, (Tokens{'b', -100, 'd', -100, -100, -100}));
}

TEST(PromptCompletions, AreRefusedAsAConversationByTheirLine) {
  struct Row {
    const char* line;
    const char* words;
  };
  for (const auto& [line, words] : std::vector<Row>{
           {R"({"prompt": ["a"], "completion": "b"})", "1 texts and the completion 1"},
           {R"({"prompt": ["a", "b"], "completion": ["c"]})", "2 texts and the completion 1"},
           {R"({"prompt": ["a", 1], "completion": ["c", "d"]})", "\"prompt\""},
           {R"({"prompt": ["abcdefgh"], "completion": ["i"]})", "the prompt has 8 of 9 tokens"},
           {R"({"prompt": [], "completion": []})", "the prompt has 0 of 0 tokens"}}) {
    EXPECT_ERROR(SampleOf(line, {.truncate = true}), "p.jsonl:1", words);
  }
}

TEST(PromptCompletions, AreTokenizedTogetherUnlessATokenReachesOver) {
  EXPECT_EQ(SampleOf(R"({"prompt": "bb", "completion": "bb"})").first,
            (Tokens{'b' + 256, 'b' + 256, 0, 0, 0, 0}));
  // Together they would be one token.
  EXPECT_EQ(SampleOf(R"({"prompt": "b", "completion": "b"})").first,
            (Tokens{'b', 'b', 0, 0, 0, 0}));
}

TEST(PromptCompletions, FillTheSequenceExactly) {
  const auto [inputs, targets] = SampleOf(R"({"prompt": "ab", "completion": "cdef"})");
  EXPECT_EQ(inputs, (Tokens{'a', 'b', 'c', 'd', 'e', 'f'}));
  EXPECT_EQ(targets.back(), 0);
  EXPECT_ERROR(SampleOf(R"({"prompt": "ab", "completion": "cdefg"})"),
               "p.jsonl:1: the sample has 8");
  EXPECT_EQ(
      SampleOf(R"({"prompt": "ab", "completion": "cdefgh"})", {.truncate = true}).second.back(),
      'g');
}

TEST(PromptCompletions, CutAPromptThatLeavesNoRoom) {
  const char* line = R"({"prompt": "abcdefgh", "completion": "xy"})";
  EXPECT_ERROR(SampleOf(line), "p.jsonl:1: the sample has 11");
  // The completion, its end and the token that texts begin with have room.
  const auto [inputs, targets] = SampleOf(line, {.begin = {9}, .truncate = true});
  EXPECT_EQ(inputs, (Tokens{9, 'f', 'g', 'h', 'x', 'y'}));
  EXPECT_EQ(targets, (Tokens{-100, -100, -100, 'x', 'y', 0}));
  const auto [of_long, cut] =
      SampleOf(R"({"prompt": "abcdefgh", "completion": "stuvwxyz"})", {.truncate = true});
  EXPECT_EQ(of_long, (Tokens{'h', 's', 't', 'u', 'v', 'w'}));
  EXPECT_EQ(cut, (Tokens{'s', 't', 'u', 'v', 'w', 'x'}));
}

TEST(PromptCompletions, BeginAndEndWithSeveralTokens) {
  const PromptOptions options{.begin = {9, 8}, .end = {7, 6}, .truncate = true};
  const auto [inputs, targets] = SampleOf(R"({"prompt": "a", "completion": "x"})", options);
  EXPECT_EQ(inputs, (Tokens{9, 8, 'a', 'x', 7, 6}));
  EXPECT_EQ(targets, (Tokens{-100, -100, 'x', 7, 6, -100}));
  const auto [of_long, cut] = SampleOf(R"({"prompt": "abcdefgh", "completion": "x"})", options);
  EXPECT_EQ(of_long, (Tokens{9, 8, 'g', 'h', 'x', 7}));
  EXPECT_EQ(cut, (Tokens{-100, -100, -100, 'x', 7, 6}));
  EXPECT_EQ(SampleOf(R"({"prompt": "", "completion": ""})", options).first,
            (Tokens{9, 8, 7, 6, 6, 6}));
  EXPECT_ERROR(SampleOf("{}", {.end = {}}), "PromptOptions::end is empty");
}

TEST(PromptCompletions, AnEmptyPromptLeavesTheFirstTokenOutOfTheTargets) {
  EXPECT_EQ(SampleOf(R"({"prompt": "", "completion": "xy"})").second,
            (Tokens{'y', 0, -100, -100, -100, -100}));
  EXPECT_EQ(SampleOf(R"({"prompt": "", "completion": "xy"})", {.begin = {9}}).second,
            (Tokens{'x', 'y', 0, -100, -100, -100}));
  EXPECT_ERROR(SampleOf(R"({"prompt": "", "completion": ""})"), "leaves none to learn");
}

}  // namespace
}  // namespace tessera::data
