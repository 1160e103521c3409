// AdamW for single elements. The learning rate, gradient factor and step are in device memory.
// Multiplications and additions are not fused, so that CPU and GPU give the same bits.
#pragma once

#include "device/lists.h"

namespace tessera::kernels {

/// A part of a parameter shard: `rows` rows of `size` elements, contiguous in the local tensor. In
/// the global tensor, consecutive rows begin `stride` elements apart.
struct AdamWPiece {
  float* parameter = nullptr;
  const float* gradient = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  const float* step = nullptr;
  std::int64_t rows = 0;
  std::int64_t size = 0;
  std::int64_t stride = 0;
  std::int64_t place = 0;  ///< index of the piece's first element in the global tensor
  std::uint64_t stream = 0;

  TESSERA_HOST_DEVICE std::int64_t numel() const { return rows * size; }
};

struct AdamW {
  Chunked<AdamWPiece, 44, 16384> list;
  const double* lr = nullptr;
  /// Factor of the gradients; nullptr means 1. If the factor is NaN or infinite, nothing is
  /// updated.
  const double* gradient_factor = nullptr;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  std::uint64_t seed = 0;
};

/// The factors of an AdamW update, which are equal for all elements of an AdamWPiece.
struct AdamWFactors {
  bool skips;  ///< whether the update is skipped, because the gradient factor is NaN or infinite
  float gradient;
  float decay;         ///< factor by which the parameter is multiplied (weight decay)
  float beta1, rest1;  ///< beta1 of AdamW, and 1 - beta1
  float beta2, rest2;
  float rate;  ///< learning rate times the bias correction of the first moment
  float root;  ///< bias correction by which sqrt(second moment) is multiplied
  float eps;
  PhiloxKey key;
};

TESSERA_HOST_DEVICE inline double power(double x, std::int64_t n) {
  double result = 1;
  for (; n > 0; n /= 2, x *= x) {
    if (n % 2 == 1) {
      result *= x;
    }
  }
  return result;
}

TESSERA_HOST_DEVICE inline AdamWFactors factors_of(const AdamW& call, const AdamWPiece& piece) {
  const auto step = static_cast<std::int64_t>(*piece.step);
  const double lr = *call.lr;
  AdamWFactors f;
  const double factor = call.gradient_factor != nullptr ? *call.gradient_factor : 1.0;
  f.skips = !(factor - factor == 0.0);
  f.gradient = static_cast<float>(factor);
  f.decay = static_cast<float>(1.0 - lr * call.weight_decay);
  f.beta1 = static_cast<float>(call.beta1);
  f.rest1 = static_cast<float>(1.0 - call.beta1);
  f.beta2 = static_cast<float>(call.beta2);
  f.rest2 = static_cast<float>(1.0 - call.beta2);
  f.rate = static_cast<float>(lr / (1.0 - power(call.beta1, step)));
  f.root = static_cast<float>(1.0 / std::sqrt(1.0 - power(call.beta2, step)));
  f.eps = static_cast<float>(call.eps);
  // Each parameter and each step has its own random stream. Adding the 64-bit golden-ratio constant
  // at each step keeps the streams far apart.
  f.key = {call.seed, piece.stream + static_cast<std::uint64_t>(step) * 0x9E3779B97F4A7C15ULL};
  return f;
}

/// Returns 128 random bits for four elements: 16 bits for each of the two moments of an element.
TESSERA_HOST_DEVICE inline PhiloxBlock bits_of_four(PhiloxKey key, std::uint64_t four) {
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  return philox4x32_10({{low(four), high(four), low(key.stream), high(key.stream)}}, low(key.seed),
                       high(key.seed));
}

/// Rounds x to bfloat16 stochastically, with 16 random bits. The probability of rounding up is (x -
/// lower neighbour) / (distance of the neighbours). Infinities and NaN are unchanged.
TESSERA_HOST_DEVICE inline float rounded_at_random(float x, std::uint32_t random) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7F800000U) == 0x7F800000U) {
    return x;
  }
  bits = (bits + (random & 0xFFFFU)) & 0xFFFF0000U;
  std::memcpy(&x, &bits, sizeof bits);
  return x;
}

/// Updates one parameter element and its moments by AdamW, in place.
TESSERA_HOST_DEVICE inline void adamw_element(const AdamWFactors& f, float gradient,
                                              float& parameter, float& exp_avg, float& exp_avg_sq) {
  const float g = gradient * f.gradient;
  exp_avg = f.beta1 * exp_avg + f.rest1 * g;
  exp_avg_sq = f.beta2 * exp_avg_sq + f.rest2 * g * g;
  const float root = std::sqrt(exp_avg_sq) * f.root + f.eps;
  parameter = parameter * f.decay - f.rate * exp_avg / root;
}

/// Updates N consecutive elements by AdamW. If kRounds, rounds the moments to bf16 stochastically.
/// `place`: index of the first of these elements in the global tensor.
template <int N, bool kRounds>
TESSERA_HOST_DEVICE void adamw_vector(const AdamWFactors& f, const Floats<N>& gradient,
                                      Floats<N>& parameter, Floats<N>& exp_avg,
                                      Floats<N>& exp_avg_sq, std::uint64_t place) {
  for (int k = 0; k < N; ++k) {
    adamw_element(f, gradient.at[k], parameter.at[k], exp_avg.at[k], exp_avg_sq.at[k]);
  }
  if constexpr (kRounds) {
    PhiloxBlock bits{};
    for (int k = 0; k < N; ++k) {
      const std::uint64_t at = place + static_cast<std::uint64_t>(k);
      if (k == 0 || at % 4 == 0) {
        bits = bits_of_four(f.key, at / 4);
      }
      const std::uint32_t random = at % 4 == 0   ? bits.words[0]
                                   : at % 4 == 1 ? bits.words[1]
                                   : at % 4 == 2 ? bits.words[2]
                                                 : bits.words[3];
      exp_avg.at[k] = rounded_at_random(exp_avg.at[k], random);
      exp_avg_sq.at[k] = rounded_at_random(exp_avg_sq.at[k], random >> 16);
    }
  }
}

/// Updates elements [begin, end) of a piece in vectors of N. This thread updates the vectors first,
/// first + step, ... M is the type of the moments.
template <class M, int N>
TESSERA_HOST_DEVICE void adamw_elements(const AdamWPiece& p, const AdamWFactors& f,
                                        std::int64_t begin, std::int64_t end, std::int64_t first,
                                        std::int64_t step) {
  auto* const exp_avg = static_cast<M*>(p.exp_avg);
  auto* const exp_avg_sq = static_cast<M*>(p.exp_avg_sq);
  for (std::int64_t i = begin + first * N; i < end; i += step * N) {
    const std::int64_t n = end - i;
    const std::int64_t row = p.rows == 1 ? 0 : i / p.size;
    const std::int64_t place = p.place + row * p.stride + (i - row * p.size);
    Floats<N> parameter = load<N>(p.parameter + i, n);
    Floats<N> mean = load<N>(exp_avg + i, n);
    Floats<N> square = load<N>(exp_avg_sq + i, n);
    adamw_vector<N, sizeof(M) == 2>(f, load<N>(p.gradient + i, n), parameter, mean, square,
                                    static_cast<std::uint64_t>(place));
    store(p.parameter + i, parameter, n);
    store(exp_avg + i, mean, n);
    store(exp_avg_sq + i, square, n);
  }
}

/// Updates the vectors first, first + step, ... of a chunk of `p`. No vector crosses the end of a
/// row, because consecutive rows are not adjacent in the global tensor.
template <class M>
TESSERA_HOST_DEVICE void adamw_chunk(const AdamWPiece& p, const AdamWFactors& f, const Chunk& chunk,
                                     std::int64_t first, std::int64_t step) {
  if (f.skips) {
    return;
  }
  constexpr int kWide = kVectorBytes / sizeof(M);
  if (is_vector(p.parameter) && is_vector(p.gradient) && is_vector(p.exp_avg) &&
      is_vector(p.exp_avg_sq) && (p.rows == 1 || p.size % kWide == 0)) {
    adamw_elements<M, kWide>(p, f, chunk.begin, chunk.end, first, step);
  } else {
    adamw_elements<M, 1>(p, f, chunk.begin, chunk.end, first, step);
  }
}

}  // namespace tessera::kernels
