#include "examples/llama/generate/sampling.h"

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <limits>
#include <vector>

#include "testing/errors.h"

namespace llama {
namespace {

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

}  // namespace
}  // namespace llama
