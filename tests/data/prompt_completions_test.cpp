#include "tessera/data/prompt_completions.h"

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

/// The user's letters and the assistant's, each turn behind its first letter.
class LetterTemplate final : public ChatTemplate {
 public:
  std::string prompt(std::string_view /*object*/, const std::string& /*origin*/) const override {
    return "";
  }
  ChatText conversation(std::string_view /*object*/, const std::string& /*origin*/) const override {
    return {"uabAcddue", {{4, 6}, {8, 9}}};
  }
};

TEST(PromptCompletions, HaveTargetsOnlyInTheAssistantsTurns) {
  const PromptOptions chat{
      .begin = {1}, .truncate = true, .chat = std::make_shared<LetterTemplate>()};
  const auto [inputs, targets] = SampleOf(R"({"messages": []})", chat);
  // The two "d" are one token, which reaches over the border: it is of what is behind it.
  EXPECT_EQ(inputs, (Tokens{'u', 'a', 'b', 'A', 'c', 'd' + 256}));
  EXPECT_EQ(targets, (Tokens{-100, -100, -100, 'c', -100, -100}));
  EXPECT_ERROR(SampleOf(R"({"messages": []})"),
               "p.jsonl:1: the line has messages, but there is no");
}

/// Its 9 tokens are longer than a sample, and the last alone is learnt.
class LateTemplate final : public ChatTemplate {
 public:
  std::string prompt(std::string_view /*object*/, const std::string& /*origin*/) const override {
    return "";
  }
  ChatText conversation(std::string_view /*object*/, const std::string& /*origin*/) const override {
    return {"abcdefghi", {{8, 9}}};
  }
};

TEST(PromptCompletions, AreChatsCutAtTheirEndAlone) {
  const PromptOptions chat{.truncate = true, .chat = std::make_shared<LateTemplate>()};
  EXPECT_ERROR(SampleOf(R"({"messages": []})", chat), "p.jsonl:1: the prompt has 8 of 9 tokens",
               "in a sequence of 6");
}

TEST(PromptCompletions, MayHaveMessagesThatAreNull) {
  EXPECT_EQ(SampleOf(R"({"messages": null, "prompt": "ab", "completion": "cd"})").first,
            (Tokens{'a', 'b', 'c', 'd', 0, 0}));
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
