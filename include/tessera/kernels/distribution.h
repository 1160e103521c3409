#pragma once

#include <variant>

#include "tessera/kernels/portable_math.h"

namespace tessera::kernels {

// Distributions as functions of one uniform number in (0, 1), by inversion: on host and device.

struct Uniform {
  double from;
  double width;
  TESSERA_HOST_DEVICE double operator()(double u) const { return from + width * u; }
};

struct Normal {
  double mean;
  double std;
  TESSERA_HOST_DEVICE double operator()(double u) const { return mean + std * normal_quantile(u); }
};

/// Normal between two bounds. `std` is negative where the upper tail is drawn as the mirrored lower
/// one, in which probabilities are represented well.
struct TruncatedNormal {
  double mean;
  double std;
  double low;
  double high;
  double first_probability;
  double probability;
  TESSERA_HOST_DEVICE double operator()(double u) const {
    const double p = first_probability + probability * u;
    const double value = p < 1.0 ? mean + std * normal_quantile(p) : (std > 0.0 ? high : low);
    return value < low ? low : (value > high ? high : value);
  }
};

struct Bernoulli {
  double p;
  TESSERA_HOST_DEVICE double operator()(double u) const { return u < p ? 1.0 : 0.0; }
};

using Distribution = std::variant<Uniform, Normal, TruncatedNormal, Bernoulli>;

/// Throws Error unless low < high, std > 0 and the interval has a probability above 1e-300.
TruncatedNormal truncated_normal(double mean, double std, double low, double high);

}  // namespace tessera::kernels
