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

constexpr int kRmsNormThreads = 256;          // in a block of the forward
constexpr int kRmsNormBackwardThreads = 128;  // more rows at once: it waits for two rows of each
// Up to these sizes a warp takes a row, and else a block. A warp has a row's terms of the weight's
// gradient for itself, of which a block's shared memory holds few.
constexpr std::int64_t kShortRow = 2048;
constexpr std::int64_t kShortBackwardRow = 512;
constexpr int kBackwardVectors = 2;  // that a thread loads at once

/// The blocks of the backward. Each sums its rows' terms of the weight's gradient: how many there
/// are depends on the sizes alone, so that the result has the same bits on every GPU. At most eight
/// for each multiprocessor of an H100, which run at once; fewer where a block has much shared
/// memory.
inline std::int64_t rms_norm_blocks(std::int64_t rows, std::int64_t size) {
  const std::int64_t rows_at_once = size <= kShortBackwardRow ? kRmsNormBackwardThreads / 32 : 1;
  const std::int64_t most =
      std::max<std::int64_t>(1, 1056 / std::max<std::int64_t>(1, (size + 4095) / 4096));
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
template <class T, int N, int kAtOnce, class Team>
TESSERA_HOST_DEVICE float sum_of_squares(const T* x, const T* residual, T* sum, std::int64_t size,
                                         float factor, Team& team) {
  float squares = 0;
  const auto add = [&](const Floats<N>& v) {
    for (int k = 0; k < N; ++k) {
      squares = std::fma(v.at[k] * factor, v.at[k] * factor, squares);
    }
  };
  const auto of_x = [&](std::int64_t i, std::int64_t n) { return load<N>(x + i, n); };
  if (residual == nullptr) {
    for_vectors<N, kAtOnce>(size, team, of_x,
                            [&](std::int64_t, std::int64_t, const auto& v) { add(v); });
  } else {
    const auto of_sum = [&](std::int64_t i, std::int64_t n) {
      return plus<T, N>(of_x(i, n), residual + i, n);
    };
    for_vectors<N, kAtOnce>(size, team, of_sum, [&](std::int64_t i, std::int64_t n, const auto& v) {
      store(sum + i, v, n);
      add(v);
    });
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
template <class T, int N, int kAtOnce, class Team>
TESSERA_HOST_DEVICE float rstd_of_row(const RmsNorm& p, std::int64_t at, Team& team) {
  const T* x = element<const T>(p.x, at);
  const T* residual = element<const T>(p.residual, at);
  T* sum = element<T>(p.sum, at);
  const auto size = static_cast<float>(p.size);
  const float squares = sum_of_squares<T, N, kAtOnce>(x, residual, sum, p.size, 1.0F, team);
  if (squares <= std::numeric_limits<float>::max() || squares != squares) {
    return 1.0F / std::sqrt(squares / size + p.eps);
  }
  const T* v = residual != nullptr ? sum : x;
  const float shrunk = sum_of_squares<T, N, kAtOnce>(v, nullptr, nullptr, p.size, kShrink, team);
  return kShrink / std::sqrt(shrunk / size);
}

/// N elements of the weight, of which n are there.
template <class W, int N>
TESSERA_HOST_DEVICE Floats<N> weight_at(const RmsNorm& p, std::int64_t i, std::int64_t n) {
  if (p.weight != nullptr) {
    return load<N>(static_cast<const W*>(p.weight) + i, n);
  }
  Floats<N> ones;
  for (int k = 0; k < N; ++k) {
    ones.at[k] = 1.0F;
  }
  return ones;
}

/// A row, by one team. T: the elements; W: those of the weight; a thread loads `kAtOnce` vectors of
/// N at once.
template <class T, class W, int N, int kAtOnce, class Team>
TESSERA_HOST_DEVICE void rms_norm_row(const RmsNorm& p, std::int64_t row, Team& team) {
  const std::int64_t at = row * p.size;
  const T* x = static_cast<const T*>(p.residual != nullptr ? p.sum : p.x) + at;
  T* out = static_cast<T*>(p.out) + at;
  const float rstd = rstd_of_row<T, N, kAtOnce>(p, at, team);
  if (team.first() == 0) {
    p.rstd[row] = rstd;
  }
  // The row is read again, each element by the thread that has seen it: it is in the nearest cache.
  for_vectors<N, kAtOnce>(
      p.size, team, [&](std::int64_t i, std::int64_t n) { return load<N>(x + i, n); },
      [&](std::int64_t i, std::int64_t n, Floats<N> v) {
        const Floats<N> w = weight_at<W, N>(p, i, n);
        for (int k = 0; k < N; ++k) {
          v.at[k] = v.at[k] * rstd * w.at[k];
        }
        store(out + i, v, n);
      });
}

/// A row's gradient by one team, which adds the row's terms of the weight's gradient to `sums`
/// (size), unless that is null. With y = x * rstd and g the gradient times the weight:
/// dx = rstd * (g - y * mean(g * y)). Each thread adds to the same elements in every row.
template <class T, class W, int N, class Team>
TESSERA_HOST_DEVICE void rms_norm_backward_row(const RmsNormBackward& p, std::int64_t row,
                                               float* sums, Team& team) {
  const RmsNorm& in = p.forward;
  const std::int64_t at = row * in.size;
  struct Pair {
    Floats<N> v, d;
  };
  // By offsets and not by a pointer for each row, which would be registers too many.
  const auto pair = [&](std::int64_t i, std::int64_t n) {
    return Pair{load<N>(static_cast<const T*>(in.x) + (at + i), n),
                load<N>(static_cast<const T*>(p.grad) + (at + i), n)};
  };
  const float rstd = in.rstd[row];
  float dot = 0;
  for_vectors<N, kBackwardVectors>(
      in.size, team, pair, [&](std::int64_t i, std::int64_t n, const Pair& of) {
        const Floats<N> w = weight_at<W, N>(in, i, n);
        Floats<N> terms = sums != nullptr ? load<N>(sums + i, n) : Floats<N>{};
        for (int k = 0; k < N; ++k) {
          const float term = of.d.at[k] * (of.v.at[k] * rstd);
          dot = std::fma(term, w.at[k], dot);
          terms.at[k] += term;
        }
        if (sums != nullptr) {
          store_anywhere(sums + i, terms, n);
        }
      });
  const float mean = team.sum(dot) / static_cast<float>(in.size);
  for_vectors<N, kBackwardVectors>(
      in.size, team, pair, [&](std::int64_t i, std::int64_t n, const Pair& of) {
        const Floats<N> w = weight_at<W, N>(in, i, n);
        Floats<N> d;
        for (int k = 0; k < N; ++k) {
          d.at[k] = std::fma(-(of.v.at[k] * rstd), mean, of.d.at[k] * w.at[k]) * rstd;
        }
        if (p.sum_grad != nullptr) {
          d = plus<T, N>(rounded<T>(d), static_cast<const T*>(p.sum_grad) + (at + i), n);
        }
        store(static_cast<T*>(p.x_grad) + (at + i), d, n);
      });
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
