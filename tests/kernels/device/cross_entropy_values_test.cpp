// Logits that are huge, infinite or not a number.
#include <gtest/gtest.h>

#include "kernels/device/cross_entropy_rows.h"

namespace tessera::kernels::cross_entropy {
namespace {

TEST_SUITE_OF_ELEMENTS(CrossEntropyOfOddValues);

TEST_OF_ELEMENTS(CrossEntropyOfOddValues, HugeLogitsDoNotOverflow) {
  const double largest = static_cast<float>(std::numeric_limits<T>::max());
  // A product of two of these would.
  const Case<T> in(6, 40, largest / 64);
  expect_losses(in, losses_of<T>(in.call()));
  expect_losses(in, losses_of_parts<T>(in, {0, 13}));
  // Label smoothing's mean keeps the digits of differences beside a large common number.
  Case<T> shifted(3, 500, 1, {0.5F, 0});
  for (T& x : shifted.logits) {
    x = static_cast<T>(static_cast<float>(x) + 512.0F);
  }
  const Losses found = losses_of<T>(shifted.call());
  EXPECT_NEAR(found.losses[0], shifted.loss(0), 1e-5);
  EXPECT_NEAR(losses_of_parts<T>(shifted, {0, 200}).losses[0], shifted.loss(0), 1e-5);
}

TEST_OF_ELEMENTS(CrossEntropyOfOddValues, LogitsOfMinusInfinityHaveNoProbability) {
  const T none = static_cast<T>(-INFINITY);
  Case<T> in(2, 24, 1);
  for (std::int64_t i = 0; i < 16; ++i) {
    in.at(0, i) = i == in.target(0) ? in.at(0, i) : none;
  }
  expect_losses(in, losses_of<T>(in.call()));
  expect_losses(in, losses_of_parts<T>(in, {0, 2, 3, 8}));  // parts of -inf alone
  const std::vector<T> gradient = gradient_of<T>(in);
  expect_gradient(in, gradient);
  EXPECT_EQ(static_cast<float>(gradient[0]), 0.0F);

  in.at(0, in.target(0)) = none;
  EXPECT_EQ(losses_of<T>(in.call()).losses[0], INFINITY);
  EXPECT_EQ(losses_of_parts<T>(in, {0, 8}).losses[0], INFINITY);
  std::fill_n(in.logits.begin(), in.columns, none);
  for (const Losses& found : {losses_of<T>(in.call()), losses_of_parts<T>(in, {0, 8})}) {
    EXPECT_TRUE(std::isnan(found.losses[0]));
    EXPECT_TRUE(std::isfinite(found.losses[1]));
  }
}

TEST_OF_ELEMENTS(CrossEntropyOfOddValues, KeepsNaNAndInfinityInTheirRow) {
  for (const float odd : {NAN, INFINITY}) {
    for (const std::int64_t column : {0, 9, 23}) {
      Case<T> in(2, 24, 1, {0.1F, 0});
      in.at(0, column) = static_cast<T>(odd);
      for (const Losses& found : {losses_of<T>(in.call()), losses_of_parts<T>(in, {0, 5})}) {
        EXPECT_TRUE(std::isnan(found.losses[0]));
        EXPECT_TRUE(std::isfinite(found.losses[1]));
      }
      const std::vector<T> gradient = gradient_of<T>(in);
      EXPECT_TRUE(std::isnan(static_cast<float>(gradient[static_cast<std::size_t>(column)])));
      EXPECT_TRUE(std::isfinite(static_cast<float>(gradient[24])));
    }
  }
}

}  // namespace
}  // namespace tessera::kernels::cross_entropy
