#include "examples/llama/generate/generate_options.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "examples/llama/generate/prompts.h"
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

TEST(GenerateOptions, TakeListsOfTheConfigFileUnlessFlagsGiveThem) {
  const tessera::testing::TemporaryFolder folder;
  const std::string file = (folder.path() / "run.toml").string();
  tessera::testing::WriteFile(file, "model = \"m\"\nprompt = [\"a\", \"b\"]\nstop = [\"x\"]\n");
  EXPECT_EQ(parse_generate_options({"--config-file", file}).prompt, (Texts{"a", "b"}));
  const GenerateOptions options = parse_generate_options({"--config-file", file, "--prompt", "c"});
  EXPECT_EQ(options.prompt, Texts{"c"});
  EXPECT_EQ(options.stop, Texts{"x"});
}

TEST(GenerateOptions, TakeSections) {
  const tessera::testing::TemporaryFolder folder;
  const std::string file = (folder.path() / "run.toml").string();
  tessera::testing::WriteFile(
      file, "[model]\nmodel = \"m\"\n[text]\nprompt = \"a\"\n[sampling]\ntop-k = 3\n");
  EXPECT_EQ(parse_generate_options({"--config-file", file}).sampling.top_k, 3);
  tessera::testing::WriteFile(file, "[text]\ntop-k = 3\n");
  EXPECT_ERROR(parse_generate_options({"--config-file", file}),
               "\"top-k\" is in [text], but belongs to [sampling]");
}

TEST(GenerateOptions, RefuseWhatContradicts) {
  const auto refused = [](Texts flags, const std::string& message) {
    flags.insert(flags.begin(), {"--model", "m"});
    EXPECT_ERROR(parse_generate_options(flags), message);
  };
  refused({}, "no prompt given");
  refused({"--prompt", ""}, "--prompt is empty");
  refused({"--prompt", "a", "--stop", ""}, "--stop is empty");
  refused({"--prompt", "a", "--prompts", "f"}, "--prompt and --prompts are both given");
  refused({"--prompt", "a", "--perplexity", "f"}, "--perplexity is given beside a prompt");
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
  EXPECT_ERROR(read("b.jsonl", "{\"prompt\": \"a\"}\n{\"text\": 1}\n"),
               "b.jsonl, line 2, has no \"prompt\"");
  EXPECT_ERROR(read("d.jsonl", "{\"prompt\": \"\"}\n"), "d.jsonl, line 1, has no \"prompt\"",
               "at least one character");
  EXPECT_ERROR(read("c.jsonl", "hello\n"), "c.jsonl, line 1, is not a JSON object");
}

}  // namespace
}  // namespace llama
