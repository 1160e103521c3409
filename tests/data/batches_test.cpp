#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>

#include <cmath>
#include <cstddef>
#include <numeric>
#include <thread>
#include <utility>

#include "data/small_tokenizers.h"
#include "tessera/data/batch_loader.h"
#include "testing/errors.h"

namespace tessera::data {
namespace {

/// Returns a source of the tokens 0, 1, 2, ..., so that each token is its position.
TokenSourcePtr Positions(std::int64_t count) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), 0);
  return make_token_source(tokens);
}

BatchLoader Loader(TokenSourcePtr tokens, std::int64_t batch, std::int64_t sequence,
                   std::int64_t vocabulary, std::optional<std::uint64_t> shuffle = std::nullopt) {
  return BatchLoader({{token_windows(std::move(tokens), sequence, vocabulary)}},
                     {.batch = batch, .shuffle = shuffle});
}

TEST(BatchLoader, TargetsAreTheNextTokensOfTheInputs) {
  const BatchLoader loader = Loader(Positions(13), 2, 3, 100);
  const auto batch = loader.load(1, {{0, 2}});
  EXPECT_TRUE(at::equal(batch.inputs, at::arange(6, 12).view({2, 3})));
  EXPECT_TRUE(at::equal(batch.targets, at::arange(7, 13).view({2, 3})));
  EXPECT_FALSE(batch.positions.defined());
  EXPECT_FALSE(loader.ignores_targets());
  EXPECT_EQ(loader.load(0, {{1, 1}}).inputs.sizes(), (std::vector<std::int64_t>{0, 3}));
  EXPECT_EQ(Loader(Positions(12), 1, 3, 100).samples(), 3);
  EXPECT_EQ(Loader(Positions(13), 1, 3, 100).samples(), 4);
}

TEST(BatchLoader, WrapsAroundInTheMiddleOfABatch) {
  const BatchLoader loader = Loader(Positions(11), 2, 2, 100);
  const auto batch = loader.load(2, {{0, 2}});
  EXPECT_TRUE(at::equal(batch.inputs[0], at::arange(8, 10)));
  EXPECT_TRUE(at::equal(batch.inputs[1], at::arange(0, 2)));
}

/// Returns the first token of each of the rows [first, last). Row indices count over all batches.
std::vector<std::int64_t> FirstTokens(const BatchLoader& loader, std::int64_t batch,
                                      std::int64_t first, std::int64_t last) {
  std::vector<std::int64_t> tokens;
  for (std::int64_t n = first; n < last; ++n) {
    tokens.push_back(
        loader.load(n / batch, {{n % batch, n % batch + 1}}).inputs[0][0].item<std::int64_t>());
  }
  return tokens;
}

TEST(BatchLoader, ShufflesEachEpochAndYieldsEachSampleOnce) {
  for (const std::int64_t samples : {5, 16, 17, 1000}) {
    const BatchLoader loader = Loader(Positions(samples * 2 + 1), 5, 2, 3000, /*shuffle=*/7);
    std::vector<std::int64_t> ordered(static_cast<std::size_t>(samples));
    for (std::int64_t i = 0; i < samples; ++i) {
      ordered[static_cast<std::size_t>(i)] = 2 * i;
    }
    std::vector<std::vector<std::int64_t>> passes;
    for (std::int64_t pass = 0; pass < 3; ++pass) {
      passes.push_back(FirstTokens(loader, 5, pass * samples, (pass + 1) * samples));
      EXPECT_NE(passes.back(), ordered);
      EXPECT_TRUE(std::ranges::is_permutation(passes.back(), ordered));
    }
    EXPECT_NE(passes[0], passes[1]);
    EXPECT_NE(passes[1], passes[2]);
    // The order of samples does not depend on the batch size.
    const BatchLoader other = Loader(Positions(samples * 2 + 1), 3, 2, 3000, /*shuffle=*/7);
    EXPECT_EQ(FirstTokens(other, 3, samples, 2 * samples), passes[1]);
    const BatchLoader seed = Loader(Positions(samples * 2 + 1), 5, 2, 3000, /*shuffle=*/8);
    EXPECT_NE(FirstTokens(seed, 5, 0, samples), passes[0]);
  }
}

/// Returns sources whose samples have one token: sample i of source k is the token 1000 * k + i.
std::vector<WeightedSamples> Sources(const std::vector<std::int64_t>& sizes,
                                     const std::vector<double>& weights) {
  std::vector<WeightedSamples> sources;
  for (std::size_t k = 0; k < sizes.size(); ++k) {
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(sizes[k]) + 1);
    std::iota(tokens.begin(), tokens.end(), static_cast<std::int64_t>(1000 * k));
    sources.push_back({token_windows(make_token_source(tokens), 1, 100000), weights[k]});
  }
  return sources;
}

TEST(BatchLoader, MixtureFollowsItsWeightsAtEveryStep) {
  const std::vector<std::vector<double>> mixtures{
      {7, 3}, {1, 1, 1}, {0.5, 0.2, 0.2, 0.05, 0.05}, {1e-3, 1, 2, 3, 4, 5, 6, 7}};
  for (const std::vector<double>& weights : mixtures) {
    const std::vector<std::int64_t> sizes(weights.size(), 999);
    const BatchLoader loader(Sources(sizes, weights), {.batch = 4});
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    std::vector<std::int64_t> taken(weights.size());
    const double bound = 0.5 * std::ceil(std::log2(weights.size())) + 1e-9;
    const auto tokens = FirstTokens(loader, 4, 0, 900);
    for (std::size_t n = 0; n < tokens.size(); ++n) {
      // The samples of each source must come in ascending order.
      const auto source = static_cast<std::size_t>(tokens[n] / 1000);
      EXPECT_EQ(tokens[n] % 1000, taken[source]++);
      for (std::size_t k = 0; k < weights.size(); ++k) {
        const double share = static_cast<double>(n + 1) * weights[k] / sum;
        ASSERT_NEAR(static_cast<double>(taken[k]), share, bound) << n << " of source " << k;
      }
    }
  }
}

TEST(BatchLoader, ExhaustedSourceRestartsWhileOthersContinue) {
  const BatchLoader loader(Sources({3, 100}, {1, 2}), {.batch = 3});
  const auto tokens = FirstTokens(loader, 3, 0, 60);
  std::vector<std::int64_t> small, large;
  for (const std::int64_t token : tokens) {
    (token < 1000 ? small : large).push_back(token % 1000);
  }
  ASSERT_EQ(small.size(), 20);
  for (std::size_t i = 0; i < small.size(); ++i) {
    EXPECT_EQ(small[i], static_cast<std::int64_t>(i % 3));
  }
  EXPECT_EQ(large.back(), 39);
}

TEST(BatchLoader, ShufflesEachSourceOfAMixtureSeparately) {
  const BatchLoader loader(Sources({16, 16}, {1, 1}), {.batch = 4, .shuffle = 5});
  const auto tokens = FirstTokens(loader, 4, 0, 64);
  std::vector<std::vector<std::int64_t>> of(2);
  for (const std::int64_t token : tokens) {
    of[static_cast<std::size_t>(token / 1000)].push_back(token % 1000);
  }
  EXPECT_NE(of[0], of[1]);
  std::vector<std::int64_t> all(16);
  std::iota(all.begin(), all.end(), 0);
  for (const auto& order : of) {
    ASSERT_EQ(order.size(), 32U);
    for (const std::ptrdiff_t pass : {0, 16}) {
      EXPECT_TRUE(std::is_permutation(all.begin(), all.end(), order.begin() + pass));
    }
  }
}

TEST(BatchLoader, RefusesInvalidStepsRowsSizesAndTokens) {
  const BatchLoader loader = Loader(Positions(13), 2, 3, 100);
  testing::expect_refusals(
      {{"step", [&] { loader.load(-1, {{0, 2}}); }, {"step -1"}},
       {"rows", [&] { loader.load(0, {{1, 3}}); }, {"rows [1, 3) of step 0", "rows [0, 2)"}},
       {"few", [] { Loader(Positions(12), 4, 3, 100); }, {"a batch of 4"}},
       {"none", [] { Loader(Positions(0), 1, 3, 100); }, {"0 tokens"}},
       {"large token",
        [] { Loader(make_token_source({1, 2, 3, 9, 1, 1, 1}), 2, 3, 9); },
        {"token 9 at position 3"}},
       {"negative token", [] { Loader(make_token_source({-1, 0}), 1, 1, 9); }, {"token -1"}},
       {"mixture",
        [] { BatchLoader(Sources({3, 100}, {1, 1}), {.batch = 8}); },
        {"3 samples of 1 tokens", "batch of 8 samples needs 4"}},
       {"weight", [] { BatchLoader(Sources({3, 3}, {1, -1}), {.batch = 1}); }, {"-1"}}});
}

/// Micro-batch i must have the same rows on any number of ranks.
TEST(BatchLoader, MicroBatchesDoNotDependOnTheRankCount) {
  const BatchLoader loader = Loader(Positions(100), 12, 4, 100);
  const at::Tensor whole = loader.load(1, {{0, 12}}).inputs;
  for (const std::int64_t ranks : {1, 2, 3}) {
    std::vector<at::Tensor> rows;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      rows.push_back(loader.load(1, rows_of_rank(12, 2, rank, ranks)).inputs);
    }
    const std::int64_t count = 6 / ranks;
    for (std::int64_t i = 0; i < 2; ++i) {
      std::vector<at::Tensor> parts;
      for (const at::Tensor& own : rows) {
        parts.push_back(own.narrow(0, i * count, count));
      }
      EXPECT_TRUE(at::cat(parts).equal(whole.narrow(0, i * 6, 6)));
    }
  }
  EXPECT_ERROR(rows_of_rank(12, 2, 0, 4), "rank 0 of 4 ranks", "batch of 12", "2 micro-batches");
}

TEST(BatchLoader, PositionsRestartAfterTheEndOfADocument) {
  const BatchLoader loader({{token_windows(make_token_source({5, 6, 0, 7, 0, 0, 8, 9, 1}), 4, 10)}},
                           {.batch = 2, .document_end = 0});
  EXPECT_TRUE(loader.ignores_targets());
  const auto batch = loader.load(0, {{0, 2}});
  const auto rows = [](std::vector<std::int64_t> values) {
    return at::tensor(values).view({2, 4});
  };
  EXPECT_TRUE(at::equal(batch.inputs, rows({5, 6, 0, 7, 0, 0, 8, 9})));
  EXPECT_TRUE(at::equal(batch.positions, rows({0, 1, 2, 0, 0, 0, 0, 1})));
  EXPECT_TRUE(at::equal(batch.targets, rows({6, 0, -100, 0, -100, -100, 9, 1})));
  EXPECT_TRUE(at::equal(batch.rows(1, 1).positions, batch.positions.narrow(0, 1, 1)));
  // A batch on a device also has a copy of the positions in CPU memory.
  const auto row = batch.to(c10::Device(c10::kMeta)).rows(1, 1);
  EXPECT_TRUE(row.positions.is_meta());
  EXPECT_TRUE(at::equal(row.host_positions, batch.positions.narrow(0, 1, 1)));
}

/// A source of 2^26 valid tokens, then 9 invalid tokens. The tokens are computed, not stored.
class LateFault : public TokenSource {
 public:
  std::int64_t size() const override { return kGood + 9; }
  void read(std::int64_t begin, std::span<std::int64_t> out) const override {
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = begin + static_cast<std::int64_t>(i) < kGood ? 1 : 50;
    }
  }
  static constexpr std::int64_t kGood = std::int64_t{1} << 26;
};

TEST(PrefetchLoader, LoadsAnyRequestedStep) {
  const auto loader = std::make_shared<BatchLoader>(Loader(Positions(100), 6, 4, 100));
  PrefetchLoader prefetch(loader, {{2, 5}});
  for (const std::int64_t step : {0, 1, 2, 7, 7, 3, 4}) {
    EXPECT_TRUE(at::equal(prefetch.load(step).targets, loader->load(step, {{2, 5}}).targets));
  }
}

TEST(PrefetchLoader, ThrowsAtTheStepWithTheError) {
  const std::int64_t bad = LateFault::kGood / 8;
  const auto loader = std::make_shared<BatchLoader>(Loader(std::make_shared<LateFault>(), 1, 8, 9));
  PrefetchLoader prefetch(loader, {{0, 1}});
  EXPECT_TRUE(prefetch.load(bad - 2).inputs.eq(1).all().item<bool>());
  EXPECT_ERROR(prefetch.load(bad - 1), "token 50 at position 67108864");
  EXPECT_TRUE(prefetch.load(0).inputs.eq(1).all().item<bool>());
}

/// A source of 9 tokens that records each read and the thread that reads.
class WatchedTokens : public TokenSource {
 public:
  std::int64_t size() const override { return 9; }
  void read(std::int64_t begin, std::span<std::int64_t> out) const override {
    std::ranges::fill(out, begin);
    reads.emplace_back(begin, std::this_thread::get_id());
  }
  mutable std::vector<std::pair<std::int64_t, std::thread::id>> reads;
};

TEST(PrefetchLoader, PrefetchesOnAnotherThreadOrOnTheCaller) {
  for (const bool background : {true, false}) {
    const auto tokens = std::make_shared<WatchedTokens>();
    const auto loader = std::make_shared<BatchLoader>(Loader(tokens, 1, 2, 9));
    tokens->reads.clear();
    {
      PrefetchLoader prefetch(loader, {{0, 1}}, /*pinned=*/false, background);
      EXPECT_EQ(prefetch.load(0).inputs[0][0].item<std::int64_t>(), 0);
      EXPECT_EQ(prefetch.load(1).inputs[0][0].item<std::int64_t>(), 2);
    }
    ASSERT_EQ(tokens->reads.size(), 3U);
    for (std::size_t i = 0; i < 3; ++i) {
      const auto& [begin, thread] = tokens->reads[i];
      EXPECT_EQ(begin, static_cast<std::int64_t>(2 * i));
      EXPECT_EQ(thread == std::this_thread::get_id(), !background);
    }
  }
}

using Tokens = std::vector<std::int64_t>;

/// A tokenizer with a token for each byte, and a token for each pair of equal letters.
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

/// Returns inputs and targets of the last sample (6 tokens) of the JSON text `line`. End token: 0.
std::pair<Tokens, Tokens> SampleOf(const std::string& line, PromptOptions options = {},
                                   const Tokenizer& tokenizer = PairTokenizer()) {
  bool given = false;
  const JsonLines lines = [&]() -> std::optional<std::pair<std::string, std::string>> {
    return std::exchange(given, true) ? std::nullopt : std::optional(std::pair(line, "p.jsonl:1"));
  };
  const auto samples = prompt_completions(lines, tokenizer, 6, options);
  std::pair<Tokens, Tokens> sample{Tokens(6), Tokens(6)};
  samples->read(samples->size() - 1, sample.first, sample.second);
  return sample;
}

constexpr int kNone = -100;

void expect(const char* line, const PromptOptions& options, const Tokens& inputs,
            const Tokens& targets) {
  EXPECT_EQ(SampleOf(line, options), std::pair(inputs, targets)) << line;
}

TEST(PromptCompletions, HaveTargetsOnlyInTheCompletions) {
  expect(R"({"prompt": "ab", "completion": "cd"})", {}, {'a', 'b', 'c', 'd', 0, 0},
         {kNone, 'c', 'd', 0, kNone, kNone});
  // The token "dd" contains text of the completion "cd" and of the prompt "du", so it is no target.
  expect(R"({"prompt": ["uabA", "du"], "completion": ["cd", "e"]})",
         {.begin = {1}, .truncate = true}, {'u', 'a', 'b', 'A', 'c', 'd' + 256},
         {kNone, kNone, kNone, 'c', kNone, kNone});
  // A JSON line with several prompts and completions (a chat) gets no begin token and no end token.
  expect(R"({"prompt": ["a", "c"], "completion": ["b", "d"]})", {.begin = {9}, .end = {8}},
         {'a', 'b', 'c', 8, 8, 8}, {'b', kNone, 'd', kNone, kNone, kNone});
  expect(R"({"prompt": "ab", "completion": "cdef"})", {}, {'a', 'b', 'c', 'd', 'e', 'f'},
         {kNone, 'c', 'd', 'e', 'f', 0});
  expect(R"({"prompt": "ab", "completion": "cdefgh"})", {.truncate = true},
         {'a', 'b', 'c', 'd', 'e', 'f'}, {kNone, 'c', 'd', 'e', 'f', 'g'});
  // Prompt and completion are tokenized together, unless a token would contain text of both.
  expect(R"({"prompt": "bb", "completion": "bb"})", {}, {'b' + 256, 'b' + 256, 0, 0, 0, 0},
         {'b' + 256, 0, kNone, kNone, kNone, kNone});
  expect(R"({"prompt": "b", "completion": "b"})", {}, {'b', 'b', 0, 0, 0, 0},
         {'b', 0, kNone, kNone, kNone, kNone});
  // With an empty prompt, no token precedes the first completion token, so this token is no target.
  expect(R"({"prompt": "", "completion": "xy"})", {}, {'x', 'y', 0, 0, 0, 0},
         {'y', 0, kNone, kNone, kNone, kNone});
  expect(R"({"prompt": "", "completion": "xy"})", {.begin = {9}}, {9, 'x', 'y', 0, 0, 0},
         {'x', 'y', 0, kNone, kNone, kNone});
  EXPECT_ERROR(SampleOf(R"({"prompt": "ab", "completion": "cdefg"})"), "p.jsonl:1", "8");
  EXPECT_ERROR(SampleOf(R"({"prompt": "", "completion": ""})"), "leaves no token to learn");
}

/// "aab" alone has the tokens a and ab, and "aabc" has the tokens a, a and bc.
TEST(PromptCompletions, ContainTokensThatDependOnTheTextAfterTheBorder) {
  const TokenizerPtr bpe = testing::Open(testing::ByteLevelJson());
  EXPECT_EQ(
      SampleOf(R"({"prompt": ["aab"], "completion": ["c"]})", {.end = {9}}, *bpe),
      (std::pair<Tokens, Tokens>{{0, 0, 9, 9, 9, 9}, {kNone, 4, kNone, kNone, kNone, kNone}}));
  EXPECT_EQ(SampleOf(R"({"prompt": ["c", "c"], "completion": ["aab", "a"]})", {.end = {9}}, *bpe),
            (std::pair<Tokens, Tokens>{{2, 0, 0, 4, 9, 9}, {0, 0, kNone, 0, kNone, kNone}}));
}

TEST(PromptCompletions, RefuseInvalidConversationsAndNameTheLine) {
  struct Row {
    const char* line;
    const char* words;
  };
  for (const Row& row : std::vector<Row>{
           {R"({"prompt": ["a"], "completion": "b"})",
            "prompt is a list of 1, and the completion is a string"},
           {R"({"prompt": ["a", "b"], "completion": ["c"]})",
            "prompt is a list of 2, and the completion is a list of 1"},
           {R"({"prompt": ["a", 1], "completion": ["c", "d"]})", "\"prompt\""},
           {R"({"prompt": ["abcdefgh"], "completion": ["i"]})", "the prompt has 8 of 9 tokens"},
           {R"({"prompt": [], "completion": []})", "the prompt has 0 of 0 tokens"}}) {
    EXPECT_ERROR(SampleOf(row.line, {.truncate = true}), "p.jsonl:1", row.words);
  }
}

TEST(PromptCompletions, TruncateLongPrompts) {
  const char* line = R"({"prompt": "abcdefgh", "completion": "xy"})";
  EXPECT_ERROR(SampleOf(line), "p.jsonl:1: the sample has 11");
  // With `truncate`, the prompt is cut until the begin token, the completion and the end token fit.
  expect(line, {.begin = {9}, .truncate = true}, {9, 'f', 'g', 'h', 'x', 'y'},
         {kNone, kNone, kNone, 'x', 'y', 0});
  expect(R"({"prompt": "abcdefgh", "completion": "stuvwxyz"})", {.truncate = true},
         {'h', 's', 't', 'u', 'v', 'w'}, {'s', 't', 'u', 'v', 'w', 'x'});
}

TEST(PromptCompletions, BeginAndEndWithSeveralTokens) {
  const PromptOptions options{.begin = {9, 8}, .end = {7, 6}, .truncate = true};
  expect(R"({"prompt": "a", "completion": "x"})", options, {9, 8, 'a', 'x', 7, 6},
         {kNone, kNone, 'x', 7, 6, kNone});
  expect(R"({"prompt": "abcdefgh", "completion": "x"})", options, {9, 8, 'g', 'h', 'x', 7},
         {kNone, kNone, kNone, 'x', 7, 6});
  EXPECT_EQ(SampleOf(R"({"prompt": "", "completion": ""})", options).first,
            (Tokens{9, 8, 7, 6, 6, 6}));
  EXPECT_ERROR(SampleOf("{}", {.end = {}}), "PromptOptions::end is empty");
}

}  // namespace
}  // namespace tessera::data
