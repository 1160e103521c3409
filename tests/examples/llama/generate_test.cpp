// Flags, sampling and stop strings of llama_generate.

#include "examples/llama/generate/generate.h"

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "examples/llama/generate/generate_options.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace llama {
namespace {

using Texts = std::vector<std::string>;

TEST(GenerateOptions, TakeSeveralPromptsAndStops) {
  const GenerateOptions options = parse_generate_options(
      {"--model", "m", "--prompt", "a", "--prompt", "b c", "--stop", "x", "--stop", "y"});
  EXPECT_EQ(options.prompt, (Texts{"a", "b c"}));
  EXPECT_EQ(options.stop, (Texts{"x", "y"}));
  EXPECT_EQ(options.dtype, "fp32");
}

TEST(GenerateOptions, TakeListsAndSectionsOfTheConfigFileUnlessFlagsGiveThem) {
  const tessera::testing::TemporaryFolder folder;
  const std::string file = (folder.path() / "run.toml").string();
  tessera::testing::WriteFile(file,
                              "model = \"m\"\n[text]\nprompt = [\"a\", \"b\"]\nstop = "
                              "[\"x\"]\n[sampling]\ntop-k = 3\n");
  EXPECT_EQ(parse_generate_options({"--config-file", file}).prompt, (Texts{"a", "b"}));
  const GenerateOptions options = parse_generate_options({"--config-file", file, "--prompt", "c"});
  EXPECT_EQ(options.prompt, Texts{"c"});
  EXPECT_EQ(options.stop, Texts{"x"});
  EXPECT_EQ(options.sampling.top_k, 3);
  tessera::testing::WriteFile(file, "[text]\ntop-k = 3\n");
  EXPECT_ERROR(parse_generate_options({"--config-file", file}),
               "\"top-k\" is in [text], but belongs to [sampling]");
}

TEST(GenerateOptions, RefuseWhatContradicts) {
  const auto refused = [](Texts flags, const auto&... words) {
    flags.insert(flags.begin(), {"--model", "m"});
    EXPECT_ERROR(parse_generate_options(flags), words...);
  };
  refused({}, "no prompt given");
  refused({"--prompt", ""}, "--prompt is empty");
  refused({"--prompt", "a", "--stop", ""}, "--stop is empty");
  refused({"--prompt", "a", "--prompts", "f"}, "--prompt and --prompts are both given");
  refused({"--prompt", "a", "--perplexity", "f"}, "--perplexity", "prompt");
  refused({"--perplexity", "f", "--top-k", "3"}, "--top-k is given, but is for texts to continue");
  refused({"--perplexity", "f", "--stop", "x"}, "--stop is given, but is for texts to continue");
  refused({"--prompt", "a", "--seed", "-1"}, "--seed: -1 is not a number of at least 0");
  refused({"--prompt", "a", "--seq", "8"}, "--seq is given, but is for --perplexity");
  refused({"--perplexity", "f", "--seq", "8", "--stride", "9"}, "--stride 9 is more than --seq 8");
  for (const char* value : {"0", "nan", "inf", "1e-320"}) {
    refused(
        {"--prompt", "a", "--repetition-penalty", value},
        std::string("--repetition-penalty: ") + value + " is not a number from 1e-06 to 1000000");
  }
  refused({"--prompt", "a", "--temperature", "nan"}, "--temperature: nan is not a number from 0");
  refused({"--prompt", "a", "--temperature", "1e-320"}, "is less than 1e-06");
  refused({"--prompt", "a", "--top-p", "nan"}, "--top-p: nan is not a number above 0, up to 1");
  refused({"--prompt", "a", "--top-p", "0"}, "--top-p: 0 is not a number above 0, up to 1");
  refused({"--prompt", "a", "--min-p", "nan"}, "--min-p: nan is not a number from 0 to 1");
  refused({"--prompt", "a", "--max-tokens", "0"}, "--max-tokens: 0 is not a number above 0");
  EXPECT_ERROR(parse_generate_options({"--prompt", "a"}), "no model given");
  refused({"--perplexity", "a", "--perplexity", "b"}, "--perplexity is given as a and as b");
}

Texts texts_of(const std::vector<PromptText>& prompts) {
  Texts texts;
  for (const PromptText& prompt : prompts) {
    texts.push_back(prompt.text);
  }
  return texts;
}

TEST(PromptTexts, AreALineEachOrOfJson) {
  const tessera::testing::TemporaryFolder folder;
  const auto read = [&](const char* name, const std::string& content) {
    const std::string file = (folder.path() / name).string();
    tessera::testing::WriteFile(file, content);
    GenerateOptions options;
    options.prompts = {file};
    return texts_of(prompt_texts(options));
  };
  EXPECT_EQ(read("a.txt", "one\r\n\ntwo {}\nthree"), (Texts{"one", "two {}", "three"}));
  EXPECT_EQ(read("a.jsonl", "{\"prompt\": \"one\\ntwo\", \"id\": 3}\n"), Texts{"one\ntwo"});
  GenerateOptions both;
  both.prompts = {(folder / "a.jsonl").string(), (folder / "a.txt").string()};
  EXPECT_EQ(texts_of(prompt_texts(both)), (Texts{"one\ntwo", "one", "two {}", "three"}));
  EXPECT_ERROR(read("b.txt", "\n\n"), "b.txt holds no prompt");
  EXPECT_ERROR(read("b.jsonl", "{\"prompt\": \"a\"}\n{\"text\": 1}\n"), "b.jsonl:2", "\"prompt\"");
  EXPECT_ERROR(read("d.jsonl", "{\"prompt\": \"\"}\n"), "d.jsonl:1", "\"prompt\"");
  EXPECT_ERROR(read("c.jsonl", "hello\n"), "c.jsonl:1", "JSON");
}

at::Tensor OneText(std::initializer_list<double> logits) {
  return at::tensor(std::vector<double>(logits)).unsqueeze(0);
}

TEST(Sampler, IsGreedyAtTemperatureZero) {
  EXPECT_EQ(Sampler({.temperature = 0}, {{0}}).next(OneText({0.1, 3.0, -2.0, 2.9})), Tokens{1});
}

TEST(Sampler, KeepsToTheLikeliest) {
  const at::Tensor logits = OneText({1.0, 1.1, 5.0, 4.9, -3.0});
  Sampler by_k({.temperature = 3.0, .top_k = 2}, {{0}});
  Sampler by_p({.temperature = 1.0, .top_p = 0.3}, {{0}});
  Sampler by_none({.temperature = 1.0, .top_p = 1e-9}, {{0}});
  Sampler by_share({.temperature = 1.0, .min_p = 0.95}, {{0}});
  for (int n = 0; n < 50; ++n) {
    const std::int64_t token = by_k.next(logits)[0];
    EXPECT_TRUE(token == 2 || token == 3);
    EXPECT_EQ(by_p.next(logits), Tokens{2});
    EXPECT_EQ(by_none.next(logits), Tokens{2});
    EXPECT_EQ(by_share.next(logits), Tokens{2});
  }
}

TEST(Sampler, RefusesASetOfNoProbability) {
  EXPECT_ERROR(Sampler({.top_p = 0}, {{0}}), "top_p is 0; it must be above 0");
  EXPECT_ERROR(Sampler({.top_p = std::nan("")}, {{0}}), "top_p is nan; it must be above 0");
}

TEST(Sampler, DrawsAsOftenAsTheSoftmaxSays) {
  const at::Tensor logits = OneText({0.0, std::log(3.0)});
  Sampler sampler({.temperature = 1.0}, {{0}});
  std::int64_t ones = 0;
  for (std::int64_t n = 0; n < 2000; ++n) {
    ones += sampler.next(logits)[0];
  }
  EXPECT_NEAR(static_cast<double>(ones) / 2000, 0.75, 0.04);
}

TEST(Sampler, DrawsForEachTextAndForTheFirstAsForItAlone) {
  const at::Tensor logits = OneText({0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7});
  Sampler alone({.temperature = 1.0, .seed = 5}, {{0}});
  Sampler both({.temperature = 1.0, .seed = 5}, {{0}, {0}});
  bool differ = false;
  for (int n = 0; n < 20; ++n) {
    const Tokens tokens = both.next(logits.expand({2, -1}));
    EXPECT_EQ(tokens[0], alone.next(logits)[0]);
    differ = differ || tokens[0] != tokens[1];
  }
  EXPECT_TRUE(differ);
}

TEST(Sampler, PenalizesTheTokensOfTheTextSoFar) {
  const at::Tensor logits = OneText({3.0, 2.9, -1.0, 2.8});
  Sampler sampler({.temperature = 0, .repetition_penalty = 1.2}, {{0}});
  // The prompt has 0; what is chosen is penalized, too.
  EXPECT_EQ(sampler.next(logits), Tokens{1});
  EXPECT_EQ(sampler.next(logits), Tokens{3});
  EXPECT_EQ(sampler.next(logits), Tokens{0});
}

TEST(Sampler, RefusesLogitsThatAreNotNumbers) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_ERROR(Sampler({}, {{0}}).next(OneText({1.0, nan})), "are not numbers", "--dtype bf16");
}

TEST(TokenProbabilities, MultipliesANegativeLogitByThePenalty) {
  const at::Tensor seen = at::tensor({1, 0}).to(c10::kBool).unsqueeze(0);
  const at::Tensor p = token_probabilities(OneText({-1.0, -2.0}), seen,
                                           {.temperature = 1.0, .repetition_penalty = 2.0});
  EXPECT_NEAR(p[0][0].item<double>(), 0.5, 1e-12);
}

using Pieces = std::vector<std::string>;

/// Stop strings, the pieces of a text, and what is shown at each piece and at the end.
struct Stops {
  Pieces stops, pieces, shown;
};

TEST(StopStrings, EndATextAndShowNoPartOfOne) {
  const std::vector<Stops> rows{
      {{"END", "."}, {"one. two END"}, {"one", ""}},
      {{".", "END"}, {"two END one."}, {"two ", ""}},
      {{"<end>"}, {"a<", "e", "nd", ">b", "c"}, {"a", "", "", "", "", ""}},
      // A text that turns out to be no stop string.
      {{"<end>"}, {"a<e", "l", "se<en"}, {"a", "<el", "se", "<en"}},
      // A stop string that begins again within a partial match.
      {{"aab"}, {"a", "a", "a", "b"}, {"", "", "a", "", ""}},
      // The longest of two partial matches.
      {{"bx", "abcd"}, {"zab", "c", "e"}, {"z", "", "abce", ""}},
      {{}, {"a", "b"}, {"a", "b", ""}}};
  for (const Stops& row : rows) {
    StopStrings stops(row.stops);
    Pieces shown;
    for (const std::string& piece : row.pieces) {
      shown.push_back(stops.push(piece));
    }
    shown.push_back(stops.finish());
    EXPECT_EQ(shown, row.shown);
  }
}

}  // namespace
}  // namespace llama
