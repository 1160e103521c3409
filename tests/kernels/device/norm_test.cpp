#include "device/norm.h"

#include <gtest/gtest.h>

#include <numeric>

#include "kernels/device/rounding.h"

namespace tessera::kernels {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

/// One thread.
struct Alone {
  static std::int64_t first() { return 0; }
  static std::int64_t width() { return 1; }
  static double sum(double x) { return x; }
};

/// Sums of all chunks, three threads each.
template <class T>
std::vector<double> sums_of(const std::vector<std::vector<T>>& tensors, std::size_t skip = 0) {
  SquareSums call{};
  for (const std::vector<T>& tensor : tensors) {
    EXPECT_TRUE(
        call.list.add({tensor.data() + skip, static_cast<std::int64_t>(tensor.size() - skip)}));
  }
  std::vector<double> sums;
  for (std::int32_t number = 0; number < call.list.chunks; ++number) {
    sums.push_back(0);
    for (int thread = 0; thread < 3; ++thread) {
      sums.back() += squares_of_chunk<T>(call, number, thread, 3);
    }
  }
  return sums;
}

template <class T>
double exact_squares(const std::vector<T>& tensor, std::size_t skip = 0) {
  long double sum = 0;
  for (std::size_t i = skip; i < tensor.size(); ++i) {
    const long double value = static_cast<float>(tensor[i]);
    sum += value * value;
  }
  return static_cast<double>(sum);
}

TEST_SUITE_OF_ELEMENTS(NormOnDevice);

TEST_OF_ELEMENTS(NormOnDevice, SumsSquaresOfAnySize) {
  for (const std::int64_t size : {1, 7, 8, 9, 65536, 65537, 200000}) {
    const std::vector<T> x = normals<T>(size, 3, 1);
    const std::vector<double> sums = sums_of<T>({x});
    EXPECT_EQ(static_cast<std::int64_t>(sums.size()), (size + 65535) / 65536);
    const double exact = exact_squares(x);
    EXPECT_NEAR(std::accumulate(sums.begin(), sums.end(), 0.0), exact, 1e-12 * exact);
  }
}

TEST_OF_ELEMENTS(NormOnDevice, TakesManyAndMisaligned) {
  std::vector<std::vector<T>> tensors;
  double exact = 0;
  for (unsigned i = 0; i < 200; ++i) {
    tensors.push_back(normals<T>(2 + i, 1, i));
    exact += exact_squares(tensors.back(), 1);
  }
  const std::vector<double> sums = sums_of<T>(tensors, /*skip=*/1);
  EXPECT_NEAR(std::accumulate(sums.begin(), sums.end(), 0.0), exact, 1e-12 * exact);
  EXPECT_LE(sizeof(SquareSums), 4096U);
}

TEST_OF_ELEMENTS(NormOnDevice, SquaresOfHugeNumbersDoNotOverflow) {
  const std::vector<T> x(9, std::numeric_limits<T>::max());
  EXPECT_DOUBLE_EQ(sums_of<T>({x})[0], exact_squares(x));
}

TEST_OF_ELEMENTS(NormOnDevice, KeepsWhatIsNotFinite) {
  std::vector<T> x(9, T(1.0F));
  x[8] = std::numeric_limits<T>::infinity();
  EXPECT_EQ(sums_of<T>({x})[0], kInf);
  x[3] = std::numeric_limits<T>::quiet_NaN();
  EXPECT_TRUE(std::isnan(sums_of<T>({x})[0]));
}

/// The kinds have sums of 2, 3 and 1 chunks.
std::vector<double> kinds_of(const std::vector<double>& sums) {
  std::vector<double> out(2);
  Alone alone;
  sum_kinds({.sums = sums.data(), .ends = {2, 5, 6}, .out = out.data()}, alone);
  return out;
}

TEST(SumKinds, SumsEachKindAlone) {
  EXPECT_EQ(kinds_of({1, 2, 4, 8, 16, 32}), (std::vector<double>{3, 28}));
}

TEST(SumKinds, CopiesShowOnlyWhereTheyAreNotFinite) {
  EXPECT_EQ(kinds_of({1, 2, 4, 8, 16, kInf}), (std::vector<double>{kInf, 28}));
  EXPECT_EQ(kinds_of({1, 2, 4, kInf, 16, 32}), (std::vector<double>{kInf, kInf}));
  EXPECT_TRUE(std::isnan(kinds_of({1, 2, 4, 8, 16, std::nan("")})[0]));
}

TEST(SumKinds, NothingIsZero) {
  std::vector<double> out(2, 7);
  Alone alone;
  sum_kinds({.sums = nullptr, .ends = {0, 0, 0}, .out = out.data()}, alone);
  EXPECT_EQ(out, (std::vector<double>{0, 0}));
}

struct Clipped {
  double norm, factor, of_step;
  float rounded;
};

Clipped clip(double owned, double plain, double max_norm) {
  const double sums[2] = {owned, plain};
  double all[3];
  float rounded = 0;
  clip_norm({.sums = sums, .max_norm = max_norm, .norm_and_factor = all, .norm = &rounded});
  return {all[0], all[1], all[2], rounded};
}

TEST(ClipNorm, DividesByALargerNorm) {
  const Clipped clipped = clip(9, 16, 2);
  EXPECT_EQ(clipped.norm, 5);
  EXPECT_EQ(clipped.rounded, 5.0F);
  EXPECT_DOUBLE_EQ(clipped.factor, 2 / (5 + 1e-6));
  EXPECT_EQ(clipped.of_step, clipped.factor);
}

TEST(ClipNorm, LeavesASmallerOne) {
  EXPECT_EQ(clip(9, 16, 6).factor, 1);
  EXPECT_EQ(clip(0, 0, 1).factor, 1);
}

TEST(ClipNorm, OfWhatIsNotFinite) {
  EXPECT_EQ(clip(kInf, 0, 1).factor, 0);
  EXPECT_TRUE(std::isnan(clip(kInf, 0, 1).of_step));
  EXPECT_TRUE(std::isnan(clip(std::nan(""), 0, 1).factor));
  EXPECT_TRUE(std::isnan(clip(std::nan(""), 0, 1).of_step));
}

}  // namespace
}  // namespace tessera::kernels
