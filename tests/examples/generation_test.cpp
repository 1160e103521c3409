#include <ATen/ops/allclose.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <cmath>

#include "examples/llama/sampling.h"

namespace llama {
namespace {

Config SmallConfig() {
  return parse_config(R"({"vocab_size": 61, "hidden_size": 64, "intermediate_size": 40,
                          "num_hidden_layers": 2, "num_attention_heads": 4,
                          "num_key_value_heads": 4, "initializer_range": 0.1})",
                      "test");
}

class Generation : public testing::Test {
 protected:
  Generation() : model_(SmallConfig(), 32) { tessera::nn::init_weights(model_, 7); }

  c10::NoGradGuard no_grad_;
  Llama model_;
};

TEST_F(Generation, CachedLogitsEqualThoseOfTheWholeSequence) {
  const at::Tensor tokens = at::randint(61, {1, 12}, c10::kLong);
  const at::Tensor whole = model_(tokens);
  KvCache cache;
  const at::Tensor prompt = model_(tokens.slice(1, 0, 5), &cache);
  EXPECT_TRUE(at::allclose(prompt, whole.slice(0, 0, 5), 1e-5, 1e-5));
  for (std::int64_t i = 5; i < 12; ++i) {
    const at::Tensor next = model_(tokens.slice(1, i, i + 1), &cache);
    EXPECT_TRUE(at::allclose(next[0], whole[i], 1e-5, 1e-5)) << "token " << i;
  }
}

TEST_F(Generation, RefusesPositionsBeyondItsTables) {
  EXPECT_THROW(model_(at::randint(61, {1, 33}, c10::kLong)), tessera::Error);
}

TEST_F(Generation, RefusesSeveralTokensAfterThePrompt) {
  KvCache cache;
  model_(at::randint(61, {1, 4}, c10::kLong), &cache);
  EXPECT_THROW(model_(at::randint(61, {1, 2}, c10::kLong), &cache), tessera::Error);
}

TEST(SampleToken, IsGreedyAtTemperatureZero) {
  const at::Tensor logits = at::tensor({0.1, 3.0, -2.0, 2.9});
  EXPECT_EQ(sample_token(logits, {.temperature = 0}, 0), 1);
}

TEST(SampleToken, KeepsToTheLikeliest) {
  const at::Tensor logits = at::tensor({1.0, 1.1, 5.0, 4.9, -3.0});
  for (std::int64_t n = 0; n < 50; ++n) {
    const std::int64_t by_k = sample_token(logits, {.temperature = 3.0, .top_k = 2}, n);
    EXPECT_TRUE(by_k == 2 || by_k == 3);
    EXPECT_EQ(sample_token(logits, {.temperature = 1.0, .top_p = 0.3}, n), 2);
  }
}

TEST(SampleToken, DrawsAsOftenAsTheSoftmaxSays) {
  const at::Tensor logits = at::tensor({0.0, std::log(3.0)});
  std::int64_t ones = 0;
  for (std::int64_t n = 0; n < 2000; ++n) ones += sample_token(logits, {.temperature = 1.0}, n);
  EXPECT_NEAR(static_cast<double>(ones) / 2000, 0.75, 0.04);
}

}  // namespace
}  // namespace llama
