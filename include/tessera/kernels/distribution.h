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

/// Those made of normal quantiles show their two halves, so that many can be drawn together.
struct Normal {
  double mean;
  double std;
  TESSERA_HOST_DEVICE double probability(double u) const { return u; }
  TESSERA_HOST_DEVICE double from_quantile(double z) const { return mean + std * z; }
  TESSERA_HOST_DEVICE double operator()(double u) const {
    return from_quantile(normal_quantile(probability(u)));
  }
};

/// Normal between two bounds. `std` is negative where the upper tail is drawn as the mirrored lower
/// one, in which probabilities are represented well.
struct TruncatedNormal {
  double mean;
  double std;
  double low;
  double high;
  double first_probability;
  double width;
  TESSERA_HOST_DEVICE double probability(double u) const { return first_probability + width * u; }
  TESSERA_HOST_DEVICE double from_quantile(double z) const {
    const double value = mean + std * z;
    return value < low ? low : (value > high ? high : value);
  }
  TESSERA_HOST_DEVICE double operator()(double u) const {
    return from_quantile(normal_quantile(probability(u)));
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
