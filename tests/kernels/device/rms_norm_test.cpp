#include "device/rms_norm.h"

#include <gtest/gtest.h>

#include "kernels/device/one_thread.h"
#include "kernels/device/rounding.h"
#include "rows/row_kernels.h"

namespace tessera::kernels {
namespace {

constexpr float kEps = 1e-5F;

/// Rows and a weight of one type or of fp32, and what is expected of them in fp64.
template <class T, class W>
struct Case {
  Case(std::int64_t row_count, std::int64_t row_size, double scale)
      : rows(row_count),
        size(row_size),
        x(normals<T>(rows * size, scale, 1)),
        grad(normals<T>(rows * size, 1, 2)),
        weight(normals<W>(size, 1, 3)),
        residual(normals<T>(rows * size, scale, 4)),
        sum_grad(normals<T>(rows * size, 1, 5)) {}

  std::int64_t rows, size;
  std::vector<T> x, grad;
  std::vector<W> weight;
  std::vector<T> residual, sum_grad;  ///< for the tests of a sum

  RmsNorm call() const {
    return {.x = x.data(),
            .weight = weight.data(),
            .weight_is_float = std::is_same_v<W, float>,
            .rows = rows,
            .size = size,
            .eps = kEps};
  }
  double x_at(std::int64_t row, std::int64_t i) const { return at(x, row * size + i); }
  double grad_at(std::int64_t row, std::int64_t i) const { return at(grad, row * size + i); }
  double weight_at(std::int64_t i) const { return at(weight, i); }
  double rstd(std::int64_t row) const {
    return 1 / std::sqrt(mean([&](std::int64_t i) { return x_at(row, i) * x_at(row, i); }) + kEps);
  }
  /// The mean over a row of what `term` gives for each element.
  template <class Term>
  double mean(Term&& term) const {
    double sum = 0;
    for (std::int64_t i = 0; i < size; ++i) {
      sum += term(i);
    }
    return sum / static_cast<double>(size);
  }

 private:
  template <class E>
  static double at(const std::vector<E>& values, std::int64_t i) {
    return static_cast<float>(values[static_cast<std::size_t>(i)]);
  }
};

/// Also of NaN, whose bits alone say what it is.
template <class E>
void expect_same_bits(const std::vector<E>& a, const std::vector<E>& b) {
  ASSERT_EQ(a.size(), b.size());
  EXPECT_TRUE(a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(E)) == 0);
}

template <class T>
struct Normed {
  std::vector<T> out;
  std::vector<float> rstd;
};

template <class T, class W, int N>
Normed<T> forward(RmsNorm call) {
  Normed<T> result{std::vector<T>(static_cast<std::size_t>(call.rows * call.size)),
                   std::vector<float>(static_cast<std::size_t>(call.rows))};
  call.out = result.out.data();
  call.rstd = result.rstd.data();
  OneThread team;
  for (std::int64_t row = 0; row < call.rows; ++row) {
    rms_norm_row<T, W, N, 2>(call, row, team);
  }
  return result;
}

template <class T, class W>
void expect_forward(const Case<T, W>& in, const Normed<T>& found) {
  for (std::int64_t row = 0; row < in.rows; ++row) {
    const double rstd = in.rstd(row);
    EXPECT_NEAR(found.rstd[static_cast<std::size_t>(row)] / rstd, 1, 1e-6);
    for (std::int64_t i = 0; i < in.size; ++i) {
      expect_rounded_once(found.out[static_cast<std::size_t>(row * in.size + i)],
                          in.x_at(row, i) * rstd * in.weight_at(i));
    }
  }
}

template <class T>
struct Gradients {
  std::vector<T> x;
  std::vector<float> weight;
};

template <class T, class W, int N>
Gradients<T> backward(RmsNorm in, const std::vector<T>& grad, std::vector<float> rstd,
                      const T* sum_grad = nullptr) {
  in.rstd = rstd.data();
  // The sums are read by 16 bytes.
  std::vector<float> sums(static_cast<std::size_t>(in.size));
  Gradients<T> result{std::vector<T>(grad.size()), {}};
  const RmsNormBackward call{
      .forward = in, .grad = grad.data(), .sum_grad = sum_grad, .x_grad = result.x.data()};
  OneThread team;
  for (std::int64_t row = 0; row < in.rows; ++row) {
    rms_norm_backward_row<T, W, N>(call, row, sums.data(), team);
  }
  result.weight = sums;
  return result;
}

template <class T, class W>
void expect_backward(const Case<T, W>& in, const Gradients<T>& found) {
  std::vector<double> weight_grad(static_cast<std::size_t>(in.size));
  for (std::int64_t row = 0; row < in.rows; ++row) {
    const double rstd = in.rstd(row);
    const auto term = [&](std::int64_t i) { return in.grad_at(row, i) * in.x_at(row, i) * rstd; };
    const double mean = in.mean([&](std::int64_t i) { return term(i) * in.weight_at(i); });
    const double terms =
        in.mean([&](std::int64_t i) { return std::abs(term(i) * in.weight_at(i)); });
    for (std::int64_t i = 0; i < in.size; ++i) {
      const double y = in.x_at(row, i) * rstd;
      const double g = in.grad_at(row, i) * in.weight_at(i);
      expect_rounded_once(found.x[static_cast<std::size_t>(row * in.size + i)],
                          rstd * (g - y * mean), rstd * (std::abs(g) + std::abs(y) * terms));
      weight_grad[static_cast<std::size_t>(i)] += term(i);
    }
  }
  for (std::size_t i = 0; i < weight_grad.size(); ++i) {
    EXPECT_NEAR(found.weight[i], weight_grad[i], 1e-5 * static_cast<double>(in.rows));
  }
}

template <class T, class W, int N>
void expect_both(const Case<T, W>& in) {
  const Normed<T> found = forward<T, W, N>(in.call());
  expect_forward(in, found);
  expect_backward(in, backward<T, W, N>(in.call(), in.grad, found.rstd));
}

/// Forward equals an addition and then the norm, bit by bit. Backward equals the norm's backward
/// and then the addition of the sum's own gradient, bit by bit.
template <class T, class W, int N>
void expect_of_sum(const Case<T, W>& in) {
  const auto added = [](const std::vector<T>& a, const std::vector<T>& b) {
    std::vector<T> sum(a.size());
    std::ranges::transform(a, b, sum.begin(), [](T x, T y) {
      return static_cast<T>(static_cast<float>(x) + static_cast<float>(y));
    });
    return sum;
  };
  Case<T, W> expected = in;
  expected.x = added(in.x, in.residual);
  const Normed<T> normed = forward<T, W, N>(expected.call());

  std::vector<T> sum(in.x.size());
  RmsNorm call = in.call();
  call.residual = in.residual.data();
  call.sum = sum.data();
  const Normed<T> found = forward<T, W, N>(call);
  expect_same_bits(sum, expected.x);
  expect_same_bits(found.out, normed.out);
  expect_same_bits(found.rstd, normed.rstd);

  const Gradients<T> alone = backward<T, W, N>(expected.call(), in.grad, found.rstd);
  const Gradients<T> both =
      backward<T, W, N>(expected.call(), in.grad, found.rstd, in.sum_grad.data());
  expect_same_bits(both.x, added(alone.x, in.sum_grad));
  expect_same_bits(both.weight, alone.weight);
}

TEST_SUITE_OF_ELEMENTS(RmsNormOnDevice);

TEST_OF_ELEMENTS(RmsNormOnDevice, IsRoundedOnceForAnySize) {
  for (const std::int64_t size : {8, 64, 128, 1000}) {
    expect_both<T, T, kVector<T>>(Case<T, T>(3, size, 2));
  }
}

TEST_OF_ELEMENTS(RmsNormOnDevice, TakesAWeightInFloat) {
  expect_both<T, float, kVector<T>>(Case<T, float>(3, 128, 2));
}

TEST_OF_ELEMENTS(RmsNormOnDevice, TakesRowsThatAreNotAligned) {
  for (const std::int64_t size : {1, 7, 33}) {
    expect_both<T, T, 1>(Case<T, T>(5, size, 2));
  }
}

TEST_OF_ELEMENTS(RmsNormOnDevice, EndsOneRowWithAPartOfAVector) {
  expect_both<T, T, kVector<T>>(Case<T, T>(1, 13, 2));
}

TEST_OF_ELEMENTS(RmsNormOnDevice, TakesNoWeight) {
  Case<T, T> in(2, 16, 2);
  std::ranges::fill(in.weight, T(1.0F));
  RmsNorm call = in.call();
  call.weight = nullptr;
  const Normed<T> found = forward<T, float, kVector<T>>(call);
  expect_forward(in, found);
  expect_backward(in, backward<T, float, kVector<T>>(call, in.grad, found.rstd));
}

TEST_OF_ELEMENTS(RmsNormOnDevice, SquaresOfHugeElementsDoNotOverflow) {
  const double largest = std::numeric_limits<T>::max();
  const Case<T, T> in(2, 24, largest / 8);
  expect_both<T, T, kVector<T>>(in);
}

TEST_OF_ELEMENTS(RmsNormOnDevice, TinyElementsAreBesideEpsilon) {
  expect_both<T, T, kVector<T>>(Case<T, T>(2, 24, 1e-6));
}

TEST_OF_ELEMENTS(RmsNormOnDevice, KeepsNaNAndInfinityInTheirRow) {
  for (const float odd : {NAN, INFINITY}) {
    Case<T, T> in(2, 16, 1);
    in.x[3] = static_cast<T>(odd);
    const Normed<T> found = forward<T, T, kVector<T>>(in.call());
    EXPECT_TRUE(std::isnan(static_cast<float>(found.out[3])));
    EXPECT_TRUE(std::isfinite(static_cast<float>(found.out[16])));
  }
}

TEST_OF_ELEMENTS(RmsNormOnDevice, NormsASumAsTwoOperationsDo) {
  for (const std::int64_t size : {8, 64, 1000}) {
    expect_of_sum<T, T, kVector<T>>(Case<T, T>(3, size, 2));
  }
  expect_of_sum<T, float, kVector<T>>(Case<T, float>(3, 128, 2));
  expect_of_sum<T, T, kVector<T>>(Case<T, T>(1, 13, 2));
  expect_of_sum<T, T, 1>(Case<T, T>(5, 7, 2));
  expect_of_sum<T, T, 1>(Case<T, T>(0, 7, 2));
}

TEST_OF_ELEMENTS(RmsNormOnDevice, NormsASumOfHugeElements) {
  expect_of_sum<T, T, kVector<T>>(Case<T, T>(2, 24, std::numeric_limits<T>::max() / 8));
}

TEST_OF_ELEMENTS(RmsNormOnDevice, NormsASumThatIsNotFinite) {
  for (const float odd : {NAN, INFINITY, -INFINITY}) {
    Case<T, T> in(2, 16, 1);
    in.x[3] = static_cast<T>(odd);
    in.residual[4] = static_cast<T>(INFINITY);
    in.sum_grad[5] = static_cast<T>(odd);
    expect_of_sum<T, T, kVector<T>>(in);
  }
}

/// One row by the row kernels of a CPU. The kernels of fp32.
struct RowOnCpu {
  RowOnCpu(const RowKernelTable& table, const Case<float, float>& in)
      : out(in.x.size()), x_grad(in.x.size()), weight_grad(in.x.size()) {
    table.fp32.rms_norm(in.x.data(), nullptr, in.weight.data(), nullptr, out.data(), &rstd, 1,
                        in.size, kEps);
    table.fp32.rms_norm_backward(in.grad.data(), nullptr, in.x.data(), in.weight.data(), &rstd,
                                 x_grad.data(), weight_grad.data(), 1, in.size);
  }
  float rstd = 0;
  std::vector<float> out, x_grad, weight_grad;
};

/// Within a few roundings of the largest number, and NaN at the same places.
void expect_alike(const std::vector<float>& a, const std::vector<float>& b) {
  float largest = 0;
  for (const float each : b) {
    largest = std::isfinite(each) ? std::max(largest, std::abs(each)) : largest;
  }
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE((std::isnan(a[i]) && std::isnan(b[i])) || a[i] == b[i] ||
                std::abs(a[i] - b[i]) <= 5e-6F * largest)
        << a[i] << " " << b[i];
  }
}

/// Rows whose squares overflow or vanish in fp32, and rows that are not finite.
TEST(RmsNormOfACpu, TreatsHugeAndTinyRowsAsOnDevice) {
  for (const double scale : {1.0, 1e20, 1e30, 6e37, 1e-25, 1e-40}) {
    for (const float odd : {0.0F, 1e20F, NAN, INFINITY}) {
      SCOPED_TRACE(::testing::Message() << scale << " " << odd);
      Case<float, float> in(1, 37, scale);
      if (odd != 0.0F) {
        in.x[35] = odd;
      }
      const Normed<float> forwards = forward<float, float, 1>(in.call());
      const Gradients<float> gradients =
          backward<float, float, 1>(in.call(), in.grad, forwards.rstd);
      const RowOnCpu found(row_kernels(), in);
      expect_alike({found.rstd}, forwards.rstd);
      expect_alike(found.out, forwards.out);
      expect_alike(found.x_grad, gradients.x);
      expect_alike(found.weight_grad, gradients.weight);
      if (odd != odd || std::isinf(odd)) {
        continue;  // The sign of a NaN is not fixed.
      }
      const RowOnCpu baseline(baseline::kTable, in);
      expect_same_bits(found.out, baseline.out);
      expect_same_bits(found.x_grad, baseline.x_grad);
      expect_same_bits(found.weight_grad, baseline.weight_grad);
    }
  }
  // The mean of equal elements' squares is exact.
  Case<float, float> in(1, 32, 1);
  in.x.assign(32, 1e20F);
  in.weight.assign(32, 1.0F);
  EXPECT_FLOAT_EQ(RowOnCpu(row_kernels(), in).out[7], 1.0F);
}

}  // namespace
}  // namespace tessera::kernels
