#include "tessera/kernels/detail/portable_math.h"

#include <gtest/gtest.h>

#include <cmath>

namespace tessera::kernels {
namespace {

double relative_error(double found, long double expected) {
  return static_cast<double>(std::fabs((found - expected) / expected));
}

TEST(PortableLog, AgreesWithLongDouble) {
  for (double x = 1e-300; x < 1e300; x *= 1.37) {
    if (std::fabs(x - 1.0) < 1e-3) {
      continue;
    }
    EXPECT_LT(relative_error(portable_log(x), std::log(static_cast<long double>(x))), 2.3e-16) << x;
  }
}

TEST(PortableLog, IsExactAtOne) {
  EXPECT_EQ(portable_log(1.0), 0.0);
}

TEST(PortableExp, AgreesWithLongDouble) {
  for (double x = -690.0; x < 690.0; x += 0.713) {
    EXPECT_LT(relative_error(portable_exp(x), std::exp(static_cast<long double>(x))), 4e-16) << x;
  }
}

TEST(NormalCdf, AgreesWithErfc) {
  for (double x = -37.0; x < 9.0; x += 0.0917) {
    const long double expected = std::erfc(-static_cast<long double>(x) / std::sqrt(2.0L)) / 2;
    EXPECT_LT(relative_error(normal_cdf(x), expected), 2e-13) << x;
  }
}

TEST(NormalCdf, SaturatesFarOut) {
  EXPECT_EQ(normal_cdf(-100.0), 0.0);
  EXPECT_EQ(normal_cdf(100.0), 1.0);
}

// The long double erfc is the oracle. In the tail, a relative error e of x is one of x^2 e in p.
TEST(NormalQuantile, InvertsErfc) {
  for (double p = 1e-300; p < 0.5; p *= 1.21) {
    const long double x = normal_quantile(p);
    const long double back = std::erfc(-x / std::sqrt(2.0L)) / 2;
    const double allowed = 1e-15 * static_cast<double>(x * x + 1.0L);
    EXPECT_LT(relative_error(p, back), allowed) << p;
  }
}

TEST(NormalQuantile, IsOdd) {
  for (double p = 0.5; p > 1e-3; p -= 1.0 / 1024) {
    EXPECT_EQ(normal_quantile(p), -normal_quantile(1.0 - p)) << p;
  }
}

}  // namespace
}  // namespace tessera::kernels
