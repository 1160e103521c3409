#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randint.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <vector>

#include "tessera/models/llama.h"
#include "tessera/nn/initialization.h"
#include "testing/errors.h"

namespace tessera::models {
namespace {

LlamaConfig SmallConfig() {
  return parse_config(R"({"vocab_size": 61, "hidden_size": 64, "intermediate_size": 40,
                          "num_hidden_layers": 2, "num_attention_heads": 4,
                          "num_key_value_heads": 4, "initializer_range": 0.1})",
                      "test");
}

class Generation : public ::testing::Test {
 protected:
  Generation() : model_(SmallConfig(), 32) { nn::init_weights(model_, 7); }

  c10::NoGradGuard no_grad_;
  Llama model_;
};

TEST_F(Generation, CachedLogitsEqualThoseOfTheWholeSequence) {
  const at::Tensor tokens = at::randint(61, {1, 12}, c10::kLong);
  const at::Tensor whole = model_(tokens);
  KvCache cache = model_.new_cache(12);
  const at::Tensor prompt = model_(tokens.slice(1, 0, 5), &cache);
  EXPECT_TRUE(at::allclose(prompt[0], whole[4], 1e-5, 1e-5));
  for (std::int64_t i = 5; i < 12; ++i) {
    const at::Tensor next = model_(tokens.slice(1, i, i + 1), &cache);
    EXPECT_TRUE(at::allclose(next[0], whole[i], 1e-5, 1e-5)) << "token " << i;
  }
  EXPECT_ERROR(model_(tokens.slice(1, 0, 1), &cache), "position 13 was asked for, but the cache");
}

TEST_F(Generation, RefusesPositionsBeyondItsTables) {
  EXPECT_ERROR(model_(at::randint(61, {1, 33}, c10::kLong)), "position 33 was asked for");
}

TEST_F(Generation, RefusesSeveralTokensAfterThePrompt) {
  KvCache cache = model_.new_cache(8);
  model_(at::randint(61, {1, 4}, c10::kLong), &cache);
  EXPECT_ERROR(model_(at::randint(61, {1, 2}, c10::kLong), &cache),
               "2 tokens were given to a filled cache");
}

TEST_F(Generation, RefusesAnotherNumberOfTextsThanTheCacheIsFor) {
  KvCache cache = model_.new_cache(8, {0, 2});
  EXPECT_ERROR(model_(at::randint(61, {3, 4}, c10::kLong), &cache),
               "tokens of 3 texts were given to a cache for 2");
}

class BatchedGeneration : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(BatchedGeneration, GivesEachTextTheLogitsThatItHasAlone) {
  const c10::NoGradGuard no_grad;
  LlamaConfig config = SmallConfig();
  config.sliding_window = GetParam();
  Llama model(config, 32);
  nn::init_weights(model, 7);
  const std::int64_t longest = 7, steps = 9;
  const std::vector<std::int64_t> padding{5, 0, 2};
  const at::Tensor tokens = at::randint(61, {3, longest + steps}, c10::kLong);
  KvCache cache = model.new_cache(longest + steps, padding);
  at::Tensor logits = model(tokens.slice(1, 0, longest), &cache);
  for (std::int64_t end = longest;; ++end) {
    for (std::int64_t i = 0; i < 3; ++i) {
      const at::Tensor alone =
          model(tokens.slice(0, i, i + 1).slice(1, padding[static_cast<std::size_t>(i)], end))[-1];
      EXPECT_TRUE(at::allclose(logits[i], alone, 1e-4, 1e-5)) << "text " << i << ", " << end;
    }
    if (end == longest + steps) {
      break;
    }
    logits = model(tokens.slice(1, end, end + 1), &cache);
  }
}

// Without a window; with one that lets padding go while texts grow, or at once.
INSTANTIATE_TEST_SUITE_P(Windows, BatchedGeneration, ::testing::Values(0, 10, 6, 3, 1));

TEST(Dropout, IsForTrainingOnly) {
  const c10::NoGradGuard no_grad;
  Llama plain(SmallConfig(), 32);
  Llama dropping(SmallConfig(), 32, /*dropout=*/0.5);
  for (Llama* model : {&plain, &dropping}) {
    nn::init_weights(*model, 7);
  }
  const at::Tensor tokens = at::randint(61, {2, 12}, c10::kLong);
  const at::Tensor want = plain(tokens);
  EXPECT_FALSE(at::allclose(dropping(tokens), want));
  dropping.eval();
  EXPECT_TRUE(at::equal(dropping(tokens), want));
}

}  // namespace
}  // namespace tessera::models
