#include "device/cross_entropy.h"

#include <gtest/gtest.h>

#include "kernels/device/one_thread.h"
#include "kernels/device/rounding.h"

namespace tessera::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kIgnored = -100;

/// One of three threads.
struct OneOfThree {
  std::int64_t number;
  std::int64_t first() const { return number; }
  static std::int64_t width() { return 3; }
};

struct Options {
  float label_smoothing = 0;
  float z_loss = 0;
};

const std::vector<Options> kOptions{{}, {0.1F, 0}, {0, 0.01F}, {0.3F, 0.02F}, {1, 0}};

/// Rows of logits, whose formulas in fp64 are the oracle.
template <class T>
struct Case {
  Case(std::int64_t row_count, std::int64_t column_count, double scale, Options of_losses = {})
      : rows(row_count),
        columns(column_count),
        options(of_losses),
        logits(normals<T>(rows * columns, scale, 1)),
        of_rows(normals<float>(rows, 1, 2)) {
    for (std::int64_t row = 0; row < rows; ++row) {
      targets.push_back(row % 3 == 2 ? kIgnored : (row * 5 + 2) % columns);
    }
  }

  std::int64_t rows, columns;
  Options options;
  std::vector<T> logits;
  std::vector<float> of_rows;
  std::vector<std::int64_t> targets;

  T& at(std::int64_t row, std::int64_t i) {
    return logits[static_cast<std::size_t>(row * columns + i)];
  }
  double x(std::int64_t row, std::int64_t i) const {
    return static_cast<float>(logits[static_cast<std::size_t>(row * columns + i)]);
  }
  std::int64_t target(std::int64_t row) const { return targets[static_cast<std::size_t>(row)]; }
  double of_row(std::int64_t row) const { return of_rows[static_cast<std::size_t>(row)]; }

  double log_sum_exp(std::int64_t row) const {
    double top = -kInfinity;
    for (std::int64_t i = 0; i < columns; ++i) {
      top = std::max(top, x(row, i));
    }
    double sum = 0;
    for (std::int64_t i = 0; i < columns; ++i) {
      sum += std::exp(x(row, i) - top);
    }
    return std::log(sum) + top;
  }
  double loss(std::int64_t row) const {
    const double lse = log_sum_exp(row);
    double loss = options.z_loss * lse * lse;
    for (std::int64_t i = 0; i < columns; ++i) {
      const double share = (1.0 - options.label_smoothing) * (i == target(row) ? 1 : 0) +
                           options.label_smoothing / static_cast<double>(columns);
      loss += share == 0 ? 0 : share * (lse - x(row, i));
    }
    return target(row) == kIgnored ? 0 : loss;
  }

  Logits call() const {
    return {.data = logits.data(),
            .stride = columns,
            .targets = targets.data(),
            .rows = rows,
            .columns = columns,
            .vocabulary = columns,
            .ignore_index = kIgnored,
            .label_smoothing = options.label_smoothing,
            .z_loss = options.z_loss};
  }
};

struct Losses {
  explicit Losses(std::int64_t rows)
      : losses(static_cast<std::size_t>(rows)), log_sum_exp(losses) {}
  std::vector<float> losses, log_sum_exp;
};

template <class T, int N = kVector<T>>
void run_rows(const CrossEntropy& call) {
  OneThread team;
  for (std::int64_t row = 0; row < call.logits.rows; ++row) {
    write_sums<T>(call, row, sums_of_row<T, N>(call.logits, row, team));
  }
}

template <class T, int N = kVector<T>>
Losses losses_of(const Logits& logits) {
  Losses result(logits.rows);
  run_rows<T, N>(
      {.logits = logits, .losses = result.losses.data(), .log_sum_exp = result.log_sum_exp.data()});
  return result;
}

/// As of ranks with these first columns: of each its part of the rows, and the two reductions.
template <class T>
Losses losses_of_parts(const Case<T>& in, const std::vector<std::int64_t>& first_columns) {
  const auto rows = static_cast<std::size_t>(in.rows);
  struct Part {
    Logits logits;
    std::vector<float> maximum, all_maximum, terms;
  };
  std::vector<Part> parts;
  std::vector<float> all(rows, -INFINITY), sums(3 * rows);
  for (std::size_t i = 0; i < first_columns.size(); ++i) {
    const std::int64_t end = i + 1 < first_columns.size() ? first_columns[i + 1] : in.columns;
    Part part{in.call(), std::vector<float>(rows), std::vector<float>(rows),
              std::vector<float>(3 * rows)};
    part.logits.data = in.logits.data() + first_columns[i];
    part.logits.first_column = first_columns[i];
    part.logits.columns = end - first_columns[i];
    run_rows<T>({.step = CrossEntropyStep::kTerms,
                 .logits = part.logits,
                 .maximum = part.maximum.data(),
                 .all_maximum = part.all_maximum.data(),
                 .terms = part.terms.data()});
    std::ranges::transform(all, part.all_maximum, all.begin(),
                           [](float a, float b) { return std::max(a, b); });
    parts.push_back(std::move(part));
  }
  for (Part& part : parts) {
    const CrossEntropy relative{.step = CrossEntropyStep::kRelative,
                                .logits = part.logits,
                                .maximum = part.maximum.data(),
                                .all_maximum = all.data(),
                                .terms = part.terms.data()};
    for (std::int64_t row = 0; row < in.rows; ++row) {
      finish_row(relative, row);
    }
    std::ranges::transform(sums, part.terms, sums.begin(), std::plus<>());
  }
  Losses result(in.rows);
  const CrossEntropy last{.step = CrossEntropyStep::kLosses,
                          .logits = parts.front().logits,
                          .all_maximum = all.data(),
                          .terms = sums.data(),
                          .losses = result.losses.data(),
                          .log_sum_exp = result.log_sum_exp.data()};
  for (std::int64_t row = 0; row < in.rows; ++row) {
    finish_row(last, row);
  }
  return result;
}

void expect_near(float found, double exact, double scale) {
  if (std::isfinite(exact)) {
    EXPECT_NEAR(found, exact, 4e-6 * scale);
  } else {
    EXPECT_TRUE(std::isnan(exact) ? std::isnan(found) : found == exact) << found << " " << exact;
  }
}

template <class T>
void expect_losses(const Case<T>& in, const Losses& found) {
  for (std::int64_t row = 0; row < in.rows; ++row) {
    const double lse = in.log_sum_exp(row), loss = in.loss(row);
    expect_near(found.log_sum_exp[static_cast<std::size_t>(row)], lse, 1 + std::abs(lse));
    expect_near(found.losses[static_cast<std::size_t>(row)], loss, 1 + std::abs(loss));
  }
}

/// By three threads that share each row.
template <class T, int N = kVector<T>>
std::vector<T> gradient_of(const Case<T>& in, CrossEntropyBackward call) {
  std::vector<T> gradient(in.logits.size());
  if (call.gradient == nullptr) {
    call.gradient = gradient.data();
    call.gradient_stride = in.columns;
  }
  for (std::int64_t row = 0; row < in.rows; ++row) {
    for (int thread = 0; thread < 3; ++thread) {
      cross_entropy_backward_row<T, N>(call, row, OneOfThree{thread});
    }
  }
  return gradient;
}

template <class T, int N = kVector<T>>
std::vector<T> gradient_of(const Case<T>& in) {
  const Losses losses = losses_of<T, N>(in.call());
  return gradient_of<T, N>(
      in,
      {.logits = in.call(), .log_sum_exp = losses.log_sum_exp.data(), .of_row = in.of_rows.data()});
}

template <class T>
void expect_gradient(const Case<T>& in, const std::vector<T>& found) {
  for (std::int64_t row = 0; row < in.rows; ++row) {
    const double lse = in.log_sum_exp(row);
    for (std::int64_t i = 0; i < in.columns; ++i) {
      const double softmax = (1 + 2 * in.options.z_loss * lse) * std::exp(in.x(row, i) - lse);
      const double share = (1.0 - in.options.label_smoothing) * (i == in.target(row) ? 1 : 0) +
                           in.options.label_smoothing / static_cast<double>(in.columns);
      const double factor = in.target(row) == kIgnored ? 0 : in.of_row(row);
      // The logarithm of the sum is rounded to fp32.
      const double terms = std::abs(factor) * (std::abs(softmax) * (1 + std::abs(lse)) + share);
      expect_rounded_once(found[static_cast<std::size_t>(row * in.columns + i)],
                          factor * (softmax - share), terms);
    }
  }
}

template <class T>
class CrossEntropyOnDevice : public ::testing::Test {};
TYPED_TEST_SUITE(CrossEntropyOnDevice, Elements);

TYPED_TEST(CrossEntropyOnDevice, TakesAnySize) {
  using T = TypeParam;
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

TYPED_TEST(CrossEntropyOnDevice, ReadsByVectorsFromAnyAddress) {
  using T = TypeParam;
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

TYPED_TEST(CrossEntropyOnDevice, PutsTheGradientInThePlaceOfTheLogits) {
  using T = TypeParam;
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

TYPED_TEST(CrossEntropyOnDevice, MultipliesByOneNumberOrByNone) {
  using T = TypeParam;
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

TYPED_TEST(CrossEntropyOnDevice, SumsOfPartsAreThoseOfTheWhole) {
  using T = TypeParam;
  for (const Options& options : kOptions) {
    const Case<T> in(6, 29, 3, options);
    for (const std::vector<std::int64_t>& first :
         {std::vector<std::int64_t>{0}, {0, 4}, {0, 0, 13}, {0, 7, 7, 28, 29}}) {
      expect_losses(in, losses_of_parts<T>(in, first));
    }
  }
}

TYPED_TEST(CrossEntropyOnDevice, GradientOfAPartSubtractsOnlyItsTargets) {
  using T = TypeParam;
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

TYPED_TEST(CrossEntropyOnDevice, HugeLogitsDoNotOverflow) {
  using T = TypeParam;
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

TYPED_TEST(CrossEntropyOnDevice, LogitsOfMinusInfinityHaveNoProbability) {
  using T = TypeParam;
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

TYPED_TEST(CrossEntropyOnDevice, KeepsNaNAndInfinityInTheirRow) {
  using T = TypeParam;
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

TYPED_TEST(CrossEntropyOnDevice, IgnoredRowsHaveNeitherLossNorGradient) {
  using T = TypeParam;
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

TYPED_TEST(CrossEntropyOnDevice, ScalesRoundingOnce) {
  using T = TypeParam;
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
}  // namespace tessera::kernels
