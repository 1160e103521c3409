#include <gtest/gtest.h>

#include "kernels/device/cross_entropy_rows.h"

namespace tessera::kernels::cross_entropy {
namespace {

const std::vector<Options> kOptions{{}, {0.1F, 0}, {0, 0.01F}, {0.3F, 0.02F}, {1, 0}};

TEST_SUITE_OF_ELEMENTS(CrossEntropyOnDevice);

TEST_OF_ELEMENTS(CrossEntropyOnDevice, TakesAnySize) {
  for (const std::int64_t columns : {1, 2, 7, 8, 9, 31, 1000}) {
    for (const Options& options : kOptions) {
      const Case<T> in(5, columns, 3, options);
      expect_losses(in, losses_of<T>(in.call()));
      expect_gradient(in, gradient_of<T>(in));
      expect_losses(in, losses_of<T, 1>(in.call()));
      expect_gradient(in, gradient_of<T, 1>(in));
    }
  }
  EXPECT_TRUE(losses_of<T>(Case<T>(0, 8, 1).call()).losses.empty());
}

TEST_OF_ELEMENTS(CrossEntropyOnDevice, ReadsByVectorsFromAnyAddress) {
  // Rows that begin at every distance of a multiple of 16 bytes, between numbers that are no
  // logits.
  const Case<T> in(9, 45, 2, {0.1F, 0});
  constexpr std::int64_t kStride = 53;
  std::vector<T> memory(static_cast<std::size_t>(in.rows * kStride + 3),
                        std::numeric_limits<T>::quiet_NaN());
  for (std::int64_t row = 0; row < in.rows; ++row) {
    std::copy_n(in.logits.begin() + row * in.columns, in.columns,
                memory.begin() + 3 + row * kStride);
  }
  Logits call = in.call();
  call.data = memory.data() + 3;
  call.stride = kStride;
  const Losses losses = losses_of<T>(call);
  expect_losses(in, losses);
  gradient_of<T>(in, {.logits = call,
                      .log_sum_exp = losses.log_sum_exp.data(),
                      .of_row = in.of_rows.data(),
                      .gradient = memory.data() + 3,
                      .gradient_stride = kStride});
  std::vector<T> gradient;
  for (std::int64_t row = 0; row < in.rows; ++row) {
    const auto begin = memory.begin() + 3 + row * kStride;
    gradient.insert(gradient.end(), begin, begin + in.columns);
    EXPECT_TRUE(std::isnan(static_cast<float>(*(begin - 1))));
    EXPECT_TRUE(row + 1 == in.rows || std::isnan(static_cast<float>(*(begin + in.columns))));
  }
  expect_gradient(in, gradient);
}

TEST_OF_ELEMENTS(CrossEntropyOnDevice, PutsTheGradientInThePlaceOfTheLogits) {
  Case<T> in(4, 37, 3, {0.2F, 0.01F});
  const std::vector<T> apart = gradient_of<T>(in);
  const Losses losses = losses_of<T>(in.call());
  gradient_of<T>(in, {.logits = in.call(),
                      .log_sum_exp = losses.log_sum_exp.data(),
                      .of_row = in.of_rows.data(),
                      .gradient = in.logits.data(),
                      .gradient_stride = in.columns});
  EXPECT_TRUE(std::ranges::equal(in.logits, apart, [](T a, T b) { return a == b; }));
}

TEST_OF_ELEMENTS(CrossEntropyOnDevice, MultipliesByOneNumberOrByNone) {
  Case<T> in(4, 16, 1);
  const Losses losses = losses_of<T>(in.call());
  std::ranges::fill(in.of_rows, 1.0F);
  const CrossEntropyBackward call{.logits = in.call(), .log_sum_exp = losses.log_sum_exp.data()};
  expect_gradient(in, gradient_of<T>(in, call));
  std::ranges::fill(in.of_rows, 0.25F);
  CrossEntropyBackward of_one = call;
  const float quarter = 0.25F;
  of_one.of_row = &quarter;
  of_one.of_row_stride = 0;
  expect_gradient(in, gradient_of<T>(in, of_one));
}

TEST_OF_ELEMENTS(CrossEntropyOnDevice, SumsOfPartsAreThoseOfTheWhole) {
  for (const Options& options : kOptions) {
    const Case<T> in(6, 29, 3, options);
    for (const std::vector<std::int64_t>& first :
         {std::vector<std::int64_t>{0}, {0, 4}, {0, 0, 13}, {0, 7, 7, 28, 29}}) {
      expect_losses(in, losses_of_parts<T>(in, first));
    }
  }
}

TEST_OF_ELEMENTS(CrossEntropyOnDevice, GradientOfAPartSubtractsOnlyItsTargets) {
  const Case<T> in(6, 24, 2, {0.1F, 0.01F});
  const Losses losses = losses_of<T>(in.call());
  std::vector<T> gradient(in.logits.size());
  for (const std::int64_t first : {0, 8}) {
    Logits part = in.call();
    part.data = in.logits.data() + first;
    part.first_column = first;
    part.columns = first == 0 ? 8 : 16;
    gradient_of<T>(in, {.logits = part,
                        .log_sum_exp = losses.log_sum_exp.data(),
                        .of_row = in.of_rows.data(),
                        .gradient = gradient.data() + first,
                        .gradient_stride = in.columns});
  }
  expect_gradient(in, gradient);
}

TEST_OF_ELEMENTS(CrossEntropyOnDevice, IgnoredRowsHaveNeitherLossNorGradient) {
  Case<T> in(3, 17, 1, {0.1F, 0.01F});
  std::ranges::fill(in.targets, kIgnored);
  in.at(1, 3) = std::numeric_limits<T>::quiet_NaN();
  EXPECT_EQ(losses_of<T>(in.call()).losses, std::vector<float>(3));
  EXPECT_EQ(losses_of_parts<T>(in, {0, 8}).losses, std::vector<float>(3));
  for (const T value : gradient_of<T>(in)) {
    EXPECT_EQ(static_cast<float>(value), 0.0F);
  }
}

TEST(CrossEntropyOnDevice64, GradientIsTheSlopeOfTheLoss) {
  Case<float> in(2, 12, 2, {0.2F, 0.05F});
  std::ranges::fill(in.of_rows, 1.0F);
  const std::vector<float> gradient = gradient_of<float>(in);
  constexpr float kStep = 1.0F / 1024;
  for (std::int64_t i = 0; i < in.columns; ++i) {
    const auto loss_at = [&](float step) {
      Case<float> moved = in;
      moved.at(1, i) += step;
      return std::pair(moved.loss(1), moved.x(1, i));
    };
    const auto [above, high] = loss_at(kStep);
    const auto [below, low] = loss_at(-kStep);
    EXPECT_NEAR(gradient[static_cast<std::size_t>(in.columns + i)], (above - below) / (high - low),
                1e-5);
  }
}

TEST_OF_ELEMENTS(CrossEntropyOnDevice, ScalesRoundingOnce) {
  const float factor = 1.0F / 3;
  for (const std::int64_t size : {0, 1, 7, 8, 33}) {
    const std::vector<T> x = normals<T>(size, 2, 1);
    const std::vector<float> sums = normals<float>(size, 2, 2);
    std::vector<T> out(x.size()), of_sums(x.size());
    for (int thread = 0; thread < 3; ++thread) {
      scale_elements<T, T, kVector<T>>(
          {.x = x.data(), .factor = &factor, .size = size, .out = out.data()}, thread, 3);
      scale_elements<float, T, kVector<T>>({.x = sums.data(),
                                            .x_is_float = true,
                                            .factor = &factor,
                                            .size = size,
                                            .out = of_sums.data()},
                                           thread, 3);
    }
    for (std::size_t i = 0; i < x.size(); ++i) {
      expect_rounded_once(out[i], static_cast<double>(static_cast<float>(x[i])) * factor);
      expect_rounded_once(of_sums[i], static_cast<double>(sums[i]) * factor);
    }
  }
}

}  // namespace
}  // namespace tessera::kernels::cross_entropy
