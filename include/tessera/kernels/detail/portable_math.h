#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "tessera/export.h"
#include "tessera/kernels/detail/philox.h"

/// Elementary functions that give the same bits on all CPUs and GPUs, by + - * / and sqrt of IEEE
/// doubles. Compile files that include this header with -ffp-contract=off and --fmad=false, so that
/// no compiler fuses a*b+c.
TESSERA_API_BEGIN
namespace tessera::kernels {

/// Returns the value of the polynomial c[0] + c[1] x + ... by Horner's rule.
template <int N>
TESSERA_HOST_DEVICE inline double polynomial(const double (&c)[N], double x) {
  double sum = c[N - 1];
  for (int i = N - 2; i >= 0; --i) {
    sum = sum * x + c[i];
  }
  return sum;
}

/// Returns the natural logarithm of a positive normal number, within 1 ulp (the method of Sun's
/// fdlibm): x = 2^k (1 + f), and an atanh series in f / (2 + f) for log(1 + f).
TESSERA_HOST_DEVICE inline double portable_log(double x) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  // Finds k and m with x = 2^k m and m in [sqrt(1/2), sqrt(2)), by integer arithmetic on the bits.
  bits += 0x3FF0000000000000ULL - 0x3FE6A09E00000000ULL;
  const auto k = static_cast<double>(static_cast<int>(bits >> 52) - 1023);
  bits = (bits & 0x000FFFFFFFFFFFFFULL) + 0x3FE6A09E00000000ULL;
  double m = 0;
  std::memcpy(&m, &bits, sizeof m);

  const double f = m - 1.0;
  const double s = f / (2.0 + f);
  const double z = s * s;
  const double c[] = {6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01,
                      2.222219843214978396e-01, 1.818357216161805012e-01, 1.531383769920937332e-01,
                      1.479819860511658591e-01};
  const double r = z * polynomial(c, z);
  const double half_square = 0.5 * f * f;
  const double ln2_high = 6.93147180369123816490e-01;  // only 32 bits: k * ln2_high is exact
  const double ln2_low = 1.90821492927058770002e-10;
  return k * ln2_high - ((half_square - (s * (half_square + r) + k * ln2_low)) - f);
}

/// Returns normal_quantile(p) for p near 1/2, where is_central(p) is true.
TESSERA_HOST_DEVICE inline double central_quantile(double p) {
  const double a[] = {3.3871328727963666080e0,  1.3314166789178437745e+2, 1.9715909503065514427e+3,
                      1.3731693765509461125e+4, 4.5921953931549871457e+4, 6.7265770927008700853e+4,
                      3.3430575583588128105e+4, 2.5090809287301226727e+3};
  const double b[] = {1.0,
                      4.2313330701600911252e+1,
                      6.8718700749205790830e+2,
                      5.3941960214247511077e+3,
                      2.1213794301586595867e+4,
                      3.9307895800092710610e+4,
                      2.8729085735721942674e+4,
                      5.2264952788528545610e+3};
  const double q = p - 0.5;
  const double r = 0.180625 - q * q;
  return q * polynomial(a, r) / polynomial(b, r);
}

/// Returns normal_quantile(p) for p near 0 or 1, where is_central(p) is false.
TESSERA_HOST_DEVICE inline double tail_quantile(double p) {
  const double c[] = {1.42343711074968357734e0,  4.63033784615654529590e0,
                      5.76949722146069140550e0,  3.64784832476320460504e0,
                      1.27045825245236838258e0,  2.41780725177450611770e-1,
                      2.27238449892691845833e-2, 7.74545014278341407640e-4};
  const double d[] = {1.0,
                      2.05319162663775882187e0,
                      1.67638483018380384940e0,
                      6.89767334985100004550e-1,
                      1.48103976427480074590e-1,
                      1.51986665636164571966e-2,
                      5.47593808499534494600e-4,
                      1.05075007164441684324e-9};
  const double e[] = {6.65790464350110377720e0,  5.46378491116411436990e0,
                      1.78482653991729133580e0,  2.96560571828504891230e-1,
                      2.65321895265761230930e-2, 1.24266094738807843860e-3,
                      2.71155556874348757815e-5, 2.01033439929228813265e-7};
  const double f[] = {1.0,
                      5.99832206555887937690e-1,
                      1.36929880922735805310e-1,
                      1.48753612908506148525e-2,
                      7.86869131145613259100e-4,
                      1.84631831751005468180e-5,
                      1.42151175831644588870e-7,
                      2.04426310338993978564e-15};
  const double r = std::sqrt(-portable_log(p < 0.5 ? p : 1.0 - p));
  const double magnitude = r <= 5.0 ? polynomial(c, r - 1.6) / polynomial(d, r - 1.6)
                                    : polynomial(e, r - 5.0) / polynomial(f, r - 5.0);
  return p < 0.5 ? -magnitude : magnitude;
}

/// Whether p is within 0.425 of 1/2, as in 85 % of all draws. normal_quantile(p) then uses the
/// formula of central_quantile(p), otherwise the formula of tail_quantile(p).
TESSERA_HOST_DEVICE inline bool is_central(double p) {
  return p - 0.5 >= -0.425 && p - 0.5 <= 0.425;
}

/// Inverts the standard normal distribution function for 0 < p < 1, with relative error 1e-16. M.
/// J. Wichura, Algorithm AS 241 (PPND16), Applied Statistics 37 (1988).
TESSERA_HOST_DEVICE inline double normal_quantile(double p) {
  return is_central(p) ? central_quantile(p) : tail_quantile(p);
}

/// Returns exp(x), |x| < 700, to about 1 ulp. With x = k ln2 + r, sums exp(r)'s Taylor series.
inline double portable_exp(double x) {
  const double ln2_high = 6.93147180369123816490e-01;
  const double ln2_low = 1.90821492927058770002e-10;
  const double scaled = x * 1.44269504088896338700e+00;
  const auto k = static_cast<std::int64_t>(scaled + (scaled < 0.0 ? -0.5 : 0.5));
  const double r = (x - static_cast<double>(k) * ln2_high) - static_cast<double>(k) * ln2_low;
  double sum = 1.0;
  for (int n = 16; n >= 1; --n) {
    sum = 1.0 + sum * r / n;
  }
  const std::uint64_t bits = static_cast<std::uint64_t>(k + 1023) << 52;
  double power = 0;
  std::memcpy(&power, &bits, sizeof power);
  return sum * power;
}

/// Computes the standard normal distribution function, accurate far into the lower tail: the series
/// of Marsaglia ("Evaluating the normal distribution", 2004) near 0, Laplace's continued fraction
/// beyond 3.
inline double normal_cdf(double x) {
  const double distance = x < 0.0 ? -x : x;
  if (distance > 37.0) {
    return x < 0.0 ? 0.0 : 1.0;
  }
  const double density = 3.98942280401432677940e-01 * portable_exp(-0.5 * x * x);
  if (distance < 3.0) {
    double term = x;
    double sum = x;
    for (int n = 3; n < 121; n += 2) {
      term = term * x * x / n;
      sum += term;
    }
    return 0.5 + sum * density;
  }
  double fraction = distance;
  for (int n = 400; n >= 1; --n) {
    fraction = distance + n / fraction;
  }
  const double upper = density / fraction;
  return x < 0.0 ? upper : 1.0 - upper;
}

}  // namespace tessera::kernels
TESSERA_API_END
