#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <variant>
#include <vector>

#include "tessera/core/detail/layout_math.h"
#include "tessera/export.h"
#include "tessera/kernels/detail/philox.h"
#include "tessera/kernels/detail/portable_math.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

// Distributions as functions of a uniform random number u in (0, 1), by inversion. A CPU and a GPU
// compute the same bits. Each element uses exactly one random number.

/// The uniform distribution on (from, from + width).
struct Uniform {
  double from;
  double width;
  TESSERA_HOST_DEVICE double operator()(double u) const { return from + width * u; }
};

/// A normal distribution.
struct Normal {
  double mean;
  double std;
  TESSERA_HOST_DEVICE double operator()(double u) const { return mean + std * normal_quantile(u); }
};

/// A normal distribution truncated to [low, high]. An interval in the upper tail is mirrored,
/// because probabilities near 0 are more precise than near 1. The flipped sign of `std` mirrors the
/// value back.
struct TruncatedNormal {
  double mean;
  double std;
  double low;
  double high;
  double first_probability;
  double width;
  TESSERA_HOST_DEVICE double operator()(double u) const {
    const double value = mean + std * normal_quantile(first_probability + width * u);
    return value < low ? low : (value > high ? high : value);
  }
};

/// A Bernoulli distribution: 1 with probability p, otherwise 0.
struct Bernoulli {
  double p;
  TESSERA_HOST_DEVICE double operator()(double u) const { return u < p ? 1.0 : 0.0; }
};

/// Any of the distributions that fill_random() supports.
using Distribution = std::variant<Uniform, Normal, TruncatedNormal, Bernoulli>;

/// Throws Error unless low < high, std > 0 and the interval has a probability above 1e-300.
TruncatedNormal truncated_normal(double mean, double std, double low, double high);

/// The elements of a global tensor in a local tensor. An element's random number depends on
/// `first_element` plus the element's row-major index in the global tensor.
struct GlobalPlace {
  std::vector<Box> boxes;
  std::vector<std::int64_t> sizes;  ///< sizes of the global tensor
  std::int64_t first_element = 0;

  /// Returns the GlobalPlace of a local tensor that has all elements of the global tensor.
  static GlobalPlace whole(std::vector<std::int64_t> sizes, std::int64_t first_element = 0);
};

// Functions that draw random numbers, with the same bits on CPU and CUDA, not recorded by autograd.
// Throw Error for types other than fp64, fp32, fp16 and bf16, and on CUDA without
// libtessera_cuda.so.

/// Fills `local`, which may have any strides. Each value is drawn in fp64 and rounded once.
void fill_random(const at::Tensor& local, const GlobalPlace& place,
                 const Distribution& distribution, PhiloxKey key);
/// Returns x after dropout: each element is set to zero with probability p, and otherwise
/// multiplied by 1/(1-p). The result is contiguous.
at::Tensor dropout(const at::Tensor& x, const GlobalPlace& place, double p, PhiloxKey key);

}  // namespace tessera::kernels
TESSERA_API_END
