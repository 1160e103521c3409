// Tests flags, prompts and sampling of llama_generate.

#include "examples/llama/generate/generate.h"

#include <ATen/ops/tensor.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "examples/llama/generate/generate_options.h"
#include "testing/errors.h"
#include "testing/files.h"

namespace llama {
namespace {

using Texts = std::vector<std::string>;

TEST(GenerateOptions, FlagsOverrideTheConfigFile) {
  const tessera::testing::TemporaryFolder folder;
  const std::string file = (folder.path() / "run.toml").string();
  tessera::testing::WriteFile(file,
                              "model = \"m\"\n[text]\nprompt = [\"a\", \"b\"]\n[sampling]\n"
                              "top-k = 3\n");
  EXPECT_EQ(parse_generate_options({"--config-file", file}).prompt, (Texts{"a", "b"}));
  const GenerateOptions options =
      parse_generate_options({"--config-file", file, "--prompt", "c", "--prompt", "d e"});
  EXPECT_EQ(options.prompt, (Texts{"c", "d e"}));
  EXPECT_EQ(options.dtype, "fp32");
  EXPECT_EQ(options.sampling.top_k, 3);
  tessera::testing::WriteFile(file, "[text]\ntop-k = 3\n");
  EXPECT_ERROR(parse_generate_options({"--config-file", file}),
               "\"top-k\" is in [text], but belongs to [sampling]");
}

TEST(GenerateOptions, RefuseContradictoryFlags) {
  const auto refused = [](Texts flags, const auto&... words) {
    flags.insert(flags.begin(), {"--model", "m"});
    EXPECT_ERROR(parse_generate_options(flags), words...);
  };
  refused({}, "no prompt given");
  refused({"--prompt", ""}, "--prompt is empty");
  refused({"--prompt", "a", "--prompts", "f"}, "--prompt and --prompts are both given");
  refused({"--prompt", "a", "--perplexity", "f"}, "--perplexity", "prompt");
  refused({"--perplexity", "f", "--top-k", "3"}, "--top-k", "--perplexity");
  refused({"--prompt", "a", "--seed", "-1"}, "--seed: -1 is not a number of at least 0");
  refused({"--prompt", "a", "--seq", "8"}, "--seq is given", "--perplexity");
  refused({"--perplexity", "f", "--seq", "8", "--stride", "9"}, "--stride 9 is more than --seq 8");
  refused({"--prompt", "a", "--temperature", "nan"}, "--temperature: nan is not a number from 0");
  refused({"--prompt", "a", "--temperature", "1e-320"}, "is less than 1e-06");
  refused({"--prompt", "a", "--top-p", "nan"}, "--top-p: nan is not a number above 0, up to 1");
  refused({"--prompt", "a", "--top-p", "0"}, "--top-p: 0 is not a number above 0, up to 1");
  refused({"--prompt", "a", "--max-tokens", "0"}, "--max-tokens: 0 is not a number above 0");
  EXPECT_ERROR(parse_generate_options({"--prompt", "a"}), "no model given");
}

Texts texts_of(const std::vector<PromptText>& prompts) {
  Texts texts;
  for (const PromptText& prompt : prompts) {
    texts.push_back(prompt.text);
  }
  return texts;
}

TEST(PromptTexts, AreReadFromTextAndJsonLines) {
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
  EXPECT_ERROR(read("b.txt", "\n\n"), "b.txt contains no prompt");
  EXPECT_ERROR(read("b.jsonl", "{\"prompt\": \"a\"}\n{\"text\": 1}\n"), "b.jsonl:2", "\"prompt\"");
  EXPECT_ERROR(read("d.jsonl", "{\"prompt\": \"\"}\n"), "d.jsonl:1", "\"prompt\"");
  EXPECT_ERROR(read("c.jsonl", "hello\n"), "c.jsonl:1", "JSON");
}

at::Tensor OneText(std::initializer_list<double> logits) {
  return at::tensor(std::vector<double>(logits)).unsqueeze(0);
}

TEST(Sampler, IsGreedyAtTemperatureZero) {
  EXPECT_EQ(Sampler({.temperature = 0}).next(OneText({0.1, 3.0, -2.0, 2.9})), Tokens{1});
}

/// Options, and the resulting probabilities if the model's probabilities are 0.05, 0.5, 0.15, 0.3.
struct Probabilities {
  SamplingOptions options;
  std::vector<double> expected;
};

TEST(TokenProbabilities, FollowTemperatureTopKAndTopP) {
  const at::Tensor logits =
      OneText({std::log(0.05), std::log(0.5), std::log(0.15), std::log(0.3)}) - 7;
  const std::vector<Probabilities> rows{
      {{.temperature = 1}, {0.05, 0.5, 0.15, 0.3}},
      {{.temperature = 1, .top_k = 2}, {0, 0.625, 0, 0.375}},
      {{.temperature = 1, .top_k = 100}, {0.05, 0.5, 0.15, 0.3}},
      {{.temperature = 1, .top_p = 0.7}, {0, 0.625, 0, 0.375}},
      {{.temperature = 1, .top_p = 1e-9}, {0, 1, 0, 0}},
      // Temperature 0.5 squares probabilities. Top-k turns 0.25 and 0.09 into 0.735 and 0.265.
      {{.temperature = 0.5, .top_k = 2, .top_p = 0.74}, {0, 25.0 / 34, 0, 9.0 / 34}},
      {{.temperature = 0.5, .top_k = 2, .top_p = 0.73}, {0, 1, 0, 0}}};
  for (const Probabilities& row : rows) {
    const at::Tensor p = token_probabilities(logits, row.options);
    for (std::size_t i = 0; i < row.expected.size(); ++i) {
      EXPECT_NEAR(p[0][static_cast<std::int64_t>(i)].item<double>(), row.expected[i], 1e-12);
    }
  }
}

TEST(Sampler, DrawsFromTheSoftmaxOfTheTopKTokens) {
  const at::Tensor logits = OneText({-0.1, 0.0, std::log(3.0), -3.0});
  Sampler sampler({.temperature = 1.0, .top_k = 2});
  std::int64_t twos = 0;
  for (std::int64_t n = 0; n < 2000; ++n) {
    const std::int64_t token = sampler.next(logits)[0];
    ASSERT_TRUE(token == 1 || token == 2);
    twos += token - 1;
  }
  EXPECT_NEAR(static_cast<double>(twos) / 2000, 0.75, 0.04);
}

TEST(Sampler, FirstTextDoesNotDependOnTheBatchSize) {
  const at::Tensor logits = OneText({0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7});
  Sampler alone({.temperature = 1.0, .seed = 5});
  Sampler both({.temperature = 1.0, .seed = 5});
  bool differ = false;
  for (int n = 0; n < 20; ++n) {
    const Tokens tokens = both.next(logits.expand({2, -1}));
    EXPECT_EQ(tokens[0], alone.next(logits)[0]);
    differ = differ || tokens[0] != tokens[1];
  }
  EXPECT_TRUE(differ);
}

TEST(Sampler, RefusesNanLogits) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_ERROR(Sampler({}).next(OneText({1.0, nan})), "NaN", "--dtype bf16");
}

}  // namespace
}  // namespace llama
