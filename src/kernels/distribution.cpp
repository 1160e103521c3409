#include "tessera/kernels/distribution.h"

#include "tessera/core/error.h"

namespace tessera::kernels {

TruncatedNormal truncated_normal(double mean, double std, double low, double high) {
  TESSERA_CHECK(std > 0.0 && low < high, "a truncated normal with std ", std, " between ", low,
                " and ", high, " was asked for; std must be positive and the bounds in order");
  const double a = (low - mean) / std;
  const double b = (high - mean) / std;
  const bool mirrored = a + b > 0.0;
  const double from = normal_cdf(mirrored ? -b : a);
  const double to = normal_cdf(mirrored ? -a : b);
  TESSERA_CHECK(to - from > 1e-300, "a normal(", mean, ", ", std, ") has no mass between ", low,
                " and ", high, "; move the bounds towards the mean");
  return {mean, mirrored ? -std : std, low, high, from, to - from};
}

}  // namespace tessera::kernels
