// RMSNorm of a row, or of the sum of two rows, and the gradients. A team of threads processes a
// row; tests use single-threaded teams.
#pragma once

#include <algorithm>

#include "device/vectors.h"
#include "rows/row_kernels.h"

namespace tessera::kernels {

struct RmsNorm {
  const void* x = nullptr;
  const void* residual = nullptr;  ///< tensor that is added to x before the norm, or nullptr
  const void* weight = nullptr;    ///< (size): the weight; nullptr stands for ones
  bool weight_is_float = false;  ///< whether the weight is fp32; if false, the weight has x's type
  std::int64_t rows = 0;
  std::int64_t size = 0;
  float eps = 0;
  /// x + residual, rounded to the type of x: the input of the norm. Unused without a residual.
  void* sum = nullptr;
  void* out = nullptr;
  float* rstd = nullptr;  ///< (rows): 1 / rms of each row, which backward uses
};

struct RmsNormBackward {
  RmsNorm forward;  ///< arguments of forward; `x` is the norm's input, with the residual added
  const void* grad = nullptr;
  /// A gradient that is added to the rounded gradient of x; nullptr if nothing is added.
  const void* sum_grad = nullptr;
  void* x_grad = nullptr;
  /// (size): gradient of the weight, in the weight's type; nullptr if the gradient is not needed.
  void* weight_grad = nullptr;
  float* terms = nullptr;  ///< (rms_norm_blocks, size): each block's sum for the weight's gradient
};

constexpr int kRmsNormThreads = 256;  // number of threads in a block of the RMSNorm forward
// Backward reads two tensors for each row. With fewer threads per block than in forward, more rows
// are processed at the same time.
constexpr int kRmsNormBackwardThreads = 128;
// A warp processes a row of up to `kShortRow` elements, a block a longer row. Backward has a lower
// limit, because each warp needs a weight gradient in shared memory.
constexpr std::int64_t kShortRow = 2048;
constexpr std::int64_t kShortBackwardRow = 512;
constexpr int kBackwardVectors = 2;  // number of vectors that a thread of backward loads at once

/// Returns the number of blocks of the RMSNorm backward: at most eight for each multiprocessor of
/// an H100. The number depends only on sizes, so that every GPU gives the same bits.
inline std::int64_t rms_norm_blocks(std::int64_t rows, std::int64_t size) {
  const std::int64_t rows_at_once = size <= kShortBackwardRow ? kRmsNormBackwardThreads / 32 : 1;
  const std::int64_t most =
      std::max<std::int64_t>(1, 1056 / std::max<std::int64_t>(1, (size + 4095) / 4096));
  return std::min(most, (rows + rows_at_once - 1) / rows_at_once);
}

template <class T, int N>
TESSERA_HOST_DEVICE Floats<N> plus(Floats<N> values, const T* other, std::int64_t n) {
  const Floats<N> added = load<N>(other, n);
  for (int k = 0; k < N; ++k) {
    values.at[k] += added.at[k];
  }
  return rounded<T>(values);
}

/// Returns the sum of (factor * v)^2 over a row v, computed by a team of threads. v is x, or x +
/// residual, which the function writes to `sum`.
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

template <class T, class Void>
TESSERA_HOST_DEVICE T* element(Void* rows, std::int64_t at) {
  return rows != nullptr ? static_cast<T*>(rows) + at : nullptr;
}

/// Returns 1 / sqrt(mean(v^2) + eps) of the row v of x that begins at element `at`. With a
/// residual, v is a row of x + residual and is also written to `sum`.
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

/// Normalises a row (RMSNorm) with one team of threads. T is the element type, W the weight's type.
/// A thread loads `kAtOnce` vectors of N elements at once.
template <class T, class W, int N, int kAtOnce, class Team>
TESSERA_HOST_DEVICE void rms_norm_row(const RmsNorm& p, std::int64_t row, Team& team) {
  const std::int64_t at = row * p.size;
  const T* x = static_cast<const T*>(p.residual != nullptr ? p.sum : p.x) + at;
  T* out = static_cast<T*>(p.out) + at;
  const float rstd = rstd_of_row<T, N, kAtOnce>(p, at, team);
  if (team.first() == 0) {
    p.rstd[row] = rstd;
  }
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

/// Computes RMSNorm's gradient of a row: dx = rstd * (g - y * mean(g * y)), y = x * rstd, g =
/// gradient * weight. Adds the row's weight gradient to `sums`, unless nullptr. Each element of
/// `sums` belongs to one thread.
template <class T, class W, int N, class Team>
TESSERA_HOST_DEVICE void rms_norm_backward_row(const RmsNormBackward& p, std::int64_t row,
                                               float* sums, Team& team) {
  const RmsNorm& in = p.forward;
  const std::int64_t at = row * in.size;
  struct Pair {
    Floats<N> v, d;
  };
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

TESSERA_HOST_DEVICE inline float sum_of_terms(const float* terms, std::int64_t rows,
                                              std::int64_t size, std::int64_t element,
                                              std::int64_t first, std::int64_t step) {
  float sum = 0;
  for (std::int64_t row = first; row < rows; row += step) {
    sum += terms[row * size + element];
  }
  return sum;
}

/// Whether all rows of RMSNorm's tensors can be accessed by vectors of 16 bytes.
inline bool is_aligned(const RmsNorm& call, Element type) {
  const auto rows = [&](const void* data) { return is_aligned(data, call.rows, call.size, type); };
  return rows(call.x) && rows(call.residual) && is_aligned(call.weight, 1, 0, type) &&
         rows(call.sum) && rows(call.out);
}
inline bool is_aligned(const RmsNormBackward& call, Element type) {
  const auto rows = [&](const void* data) {
    return is_aligned(data, call.forward.rows, call.forward.size, type);
  };
  return is_aligned(call.forward, type) && rows(call.grad) && rows(call.sum_grad) &&
         rows(call.x_grad);
}

}  // namespace tessera::kernels
