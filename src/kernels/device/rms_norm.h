// RMSNorm of rows or of the sum of two, and its gradients. A team of threads takes a row; in the
// tests it is one thread.
#pragma once

#include <algorithm>

#include "device/vectors.h"

namespace tessera::kernels {

/// Dense rows of `size` elements.
struct RmsNorm {
  const void* x = nullptr;
  const void* residual = nullptr;  ///< what is added to x before; null: nothing
  const void* weight = nullptr;    ///< (size), or null for ones
  bool weight_is_float = false;    ///< fp32; otherwise of the type of x
  std::int64_t rows = 0;
  std::int64_t size = 0;
  float eps = 0;
  void* sum = nullptr;  ///< x + residual, rounded: what is normed; without a residual unused
  void* out = nullptr;
  float* rstd = nullptr;  ///< (rows); backward reads it
};

struct RmsNormBackward {
  RmsNorm forward;  ///< without a result, and x as it was normed
  const void* grad = nullptr;
  /// What is added to the gradient of x, after that is rounded; null: nothing.
  const void* sum_grad = nullptr;
  void* x_grad = nullptr;
  void* weight_grad = nullptr;  ///< (size), of the weight's type; null where it is not wanted
  float* terms = nullptr;       ///< (rms_norm_blocks, size): terms of the weight's gradient
};

constexpr int kRmsNormThreads = 256;     // in a block
constexpr std::int64_t kShortRow = 512;  // up to here a warp takes a row, and else a block

/// The blocks of the backward. Each sums its rows' terms of the weight's gradient: how many there
/// are depends on the sizes alone, so that the result has the same bits on every GPU. At most four
/// for each multiprocessor of an H100, which run at once; fewer where a block has much shared
/// memory.
inline std::int64_t rms_norm_blocks(std::int64_t rows, std::int64_t size) {
  const std::int64_t rows_at_once = size <= kShortRow ? kRmsNormThreads / 32 : 1;
  const std::int64_t most =
      std::max<std::int64_t>(1, 528 / std::max<std::int64_t>(1, (size + 4095) / 4096));
  return std::min(most, (rows + rows_at_once - 1) / rows_at_once);
}

/// Multiplies squares that would overflow in fp32.
constexpr float kShrink = 0x1p-80F;

/// The rounded sum of values that were loaded and those of another row in their places.
template <class T, int N>
TESSERA_HOST_DEVICE Floats<N> plus(Floats<N> values, const T* other, std::int64_t n) {
  const Floats<N> added = load<N>(other, n);
  for (int k = 0; k < N; ++k) {
    values.at[k] += added.at[k];
  }
  return rounded<T>(values);
}

/// The sum over elements times `factor`, by the threads of a team. With a residual they are those
/// of x + residual, which it writes to `sum`.
template <class T, int N, class Team>
TESSERA_HOST_DEVICE float sum_of_squares(const T* x, const T* residual, T* sum, std::int64_t size,
                                         float factor, Team& team) {
  float squares = 0;
  for (std::int64_t i = team.first() * N; i < size; i += team.width() * N) {
    Floats<N> v = load<N>(x + i, size - i);
    if (residual != nullptr) {
      v = plus<T, N>(v, residual + i, size - i);
      store(sum + i, v, size - i);
    }
    for (int k = 0; k < N; ++k) {
      squares = std::fma(v.at[k] * factor, v.at[k] * factor, squares);
    }
  }
  return team.sum(squares);
}

/// Where element `at` of `rows` is; null where there are none.
template <class T, class Void>
TESSERA_HOST_DEVICE T* element(Void* rows, std::int64_t at) {
  return rows != nullptr ? static_cast<T*>(rows) + at : nullptr;
}

/// 1 / sqrt(mean(v^2) + eps) of the row v from element `at`: that of x or, where a residual is
/// added, of `sum`, which it writes. Only rows of huge elements are read once more.
template <class T, int N, class Team>
TESSERA_HOST_DEVICE float rstd_of_row(const RmsNorm& p, std::int64_t at, Team& team) {
  const T* x = element<const T>(p.x, at);
  const T* residual = element<const T>(p.residual, at);
  T* sum = element<T>(p.sum, at);
  const auto size = static_cast<float>(p.size);
  const float squares = sum_of_squares<T, N>(x, residual, sum, p.size, 1.0F, team);
  if (squares <= std::numeric_limits<float>::max() || squares != squares) {
    return 1.0F / std::sqrt(squares / size + p.eps);
  }
  const T* v = residual != nullptr ? sum : x;
  const float shrunk = sum_of_squares<T, N>(v, nullptr, nullptr, p.size, kShrink, team);
  return kShrink / std::sqrt(shrunk / size);
}

/// N elements of the weight.
template <class W, int N>
TESSERA_HOST_DEVICE Floats<N> weight_at(const RmsNorm& p, std::int64_t i) {
  if (p.weight != nullptr) {
    return load<N>(static_cast<const W*>(p.weight) + i, p.size - i);
  }
  Floats<N> ones;
  for (int k = 0; k < N; ++k) {
    ones.at[k] = 1.0F;
  }
  return ones;
}

/// A row, by one team. T: the elements; W: those of the weight.
template <class T, class W, int N, class Team>
TESSERA_HOST_DEVICE void rms_norm_row(const RmsNorm& p, std::int64_t row, Team& team) {
  const std::int64_t at = row * p.size;
  const T* x = static_cast<const T*>(p.residual != nullptr ? p.sum : p.x) + at;
  T* out = static_cast<T*>(p.out) + at;
  const float rstd = rstd_of_row<T, N>(p, at, team);
  if (team.first() == 0) {
    p.rstd[row] = rstd;
  }
  // The row is read again, each element by the thread that has seen it: it is in the nearest cache.
  for (std::int64_t i = team.first() * N; i < p.size; i += team.width() * N) {
    Floats<N> v = load<N>(x + i, p.size - i);
    const Floats<N> w = weight_at<W, N>(p, i);
    for (int k = 0; k < N; ++k) {
      v.at[k] = v.at[k] * rstd * w.at[k];
    }
    store(out + i, v, p.size - i);
  }
}

/// A row's gradient by one team, which adds the row's terms of the weight's gradient to `sums`
/// (size), unless that is null. With y = x * rstd and g the gradient times the weight:
/// dx = rstd * (g - y * mean(g * y)). Each thread adds to the same elements in every row.
template <class T, class W, int N, class Team>
TESSERA_HOST_DEVICE void rms_norm_backward_row(const RmsNormBackward& p, std::int64_t row,
                                               float* sums, Team& team) {
  const RmsNorm& in = p.forward;
  const std::int64_t at = row * in.size;
  // By offsets and not by a pointer for each row, which would be registers too many.
  const auto elements = [&](const void* rows, std::int64_t i) {
    return load<N>(static_cast<const T*>(rows) + (at + i), in.size - i);
  };
  const float rstd = in.rstd[row];
  float dot = 0;
  for (std::int64_t i = team.first() * N; i < in.size; i += team.width() * N) {
    const Floats<N> v = elements(in.x, i);
    const Floats<N> d = elements(p.grad, i);
    const Floats<N> w = weight_at<W, N>(in, i);
    Floats<N> terms = sums != nullptr ? load<N>(sums + i, in.size - i) : Floats<N>{};
    for (int k = 0; k < N; ++k) {
      const float term = d.at[k] * (v.at[k] * rstd);
      dot = std::fma(term, w.at[k], dot);
      terms.at[k] += term;
    }
    if (sums != nullptr) {
      store(sums + i, terms, in.size - i);
    }
  }
  const float mean = team.sum(dot) / static_cast<float>(in.size);
  for (std::int64_t i = team.first() * N; i < in.size; i += team.width() * N) {
    const Floats<N> v = elements(in.x, i);
    Floats<N> d = elements(p.grad, i);
    const Floats<N> w = weight_at<W, N>(in, i);
    for (int k = 0; k < N; ++k) {
      d.at[k] = std::fma(-(v.at[k] * rstd), mean, d.at[k] * w.at[k]) * rstd;
    }
    if (p.sum_grad != nullptr) {
      d = plus<T, N>(rounded<T>(d), static_cast<const T*>(p.sum_grad) + (at + i), in.size - i);
    }
    store(static_cast<T*>(p.x_grad) + (at + i), d, in.size - i);
  }
}

/// The sum of one element's terms `first`, `first` + `step` and so on of `rows`.
TESSERA_HOST_DEVICE inline float sum_of_terms(const float* terms, std::int64_t rows,
                                              std::int64_t size, std::int64_t element,
                                              std::int64_t first, std::int64_t step) {
  float sum = 0;
  for (std::int64_t row = first; row < rows; row += step) {
    sum += terms[row * size + element];
  }
  return sum;
}

}  // namespace tessera::kernels
