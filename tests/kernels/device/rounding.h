// What the tests of the CUDA kernels' host forms share: elements, and how far one is from the exact
// result.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace tessera::kernels {

using Elements = ::testing::Types<float, c10::BFloat16, c10::Half>;

/// A suite of tests of each type of element.
#define TEST_SUITE_OF_ELEMENTS(suite)      \
  template <class>                         \
  class suite : public ::testing::Test {}; \
  TYPED_TEST_SUITE(suite, Elements)

/// Its test: TEST_OF_ELEMENTS(Suite, Name) { ... T ... }.
#define TEST_OF_ELEMENTS(suite, name) \
  template <class T>                  \
  void suite##_##name();              \
  TYPED_TEST(suite, name) {           \
    suite##_##name<TypeParam>();      \
  }                                   \
  template <class T>                  \
  void suite##_##name()

/// How many elements the kernels take at once: as many as 16 bytes have, or one.
template <class T>
constexpr int kVector = 16 / sizeof(T);

/// `size` normal numbers times `scale`, rounded to T.
template <class T>
std::vector<T> normals(std::int64_t size, double scale, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal(0, scale);
  std::vector<T> values(static_cast<std::size_t>(size));
  std::ranges::generate(values, [&] { return static_cast<T>(static_cast<float>(normal(engine))); });
  return values;
}

/// The distance of numbers of T about `exact`.
template <class T>
double ulp(double exact) {
  using Limits = std::numeric_limits<T>;
  const int exponent = exact == 0 ? Limits::min_exponent : std::ilogb(exact) + 1;
  return std::ldexp(1.0, std::max(exponent, Limits::min_exponent) - Limits::digits);
}

/// `exact` rounded once is within half an ulp; fp32 arithmetic adds some of its own ulps, of the
/// result or, where terms cancel, of `terms`.
template <class T>
void expect_rounded_once(T found, double exact, double terms = 0) {
  const double largest = std::numeric_limits<T>::max();
  const double value = static_cast<float>(found);
  if (std::isnan(exact)) {
    EXPECT_TRUE(std::isnan(value)) << value;
  } else if (std::abs(exact) > largest) {
    EXPECT_GE(std::copysign(1.0, exact) * value, largest) << exact;
  } else {
    const double arithmetic = 8 * ulp<float>(std::max(std::abs(exact), terms));
    EXPECT_LE(std::abs(value - exact), 0.5 * ulp<T>(exact) + arithmetic) << value << " " << exact;
  }
}

}  // namespace tessera::kernels
