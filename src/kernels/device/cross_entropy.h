// Cross entropy and gradient of rows of logits, with a whole vocabulary or a vocabulary split
// between ranks. A team of threads processes a row; tests use single-threaded teams.
#pragma once

#include <algorithm>

#include "device/vectors.h"

namespace tessera::kernels {

/// A matrix of logits. Rows are tokens; columns are this rank's shard of the vocabulary.
struct Logits {
  const void* data = nullptr;
  std::int64_t stride = 0;  ///< distance between the beginnings of rows of logits, in elements
  const std::int64_t* targets = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t first_column = 0;
  std::int64_t vocabulary = 0;  ///< total number of vocabulary columns on all ranks
  std::int64_t ignore_index = 0;
  float label_smoothing = 0;
  float z_loss = 0;

  TESSERA_HOST_DEVICE bool is_ignored(std::int64_t row) const {
    return targets[row] == ignore_index;
  }
  /// Returns the index of the row's target among this rank's columns. An index outside of [0,
  /// columns) means that another rank has the target's column.
  TESSERA_HOST_DEVICE std::int64_t target(std::int64_t row) const {
    return targets[row] - first_column;
  }
  TESSERA_HOST_DEVICE bool has_target(std::int64_t row) const {
    return target(row) >= 0 && target(row) < columns;
  }
};

/// The steps of the cross-entropy forward. kWhole computes losses with a whole vocabulary. For a
/// split vocabulary, kTerms computes this rank's maximum and terms, kRelative rescales terms to the
/// maximum over all ranks, and kLosses uses the summed terms.
enum class CrossEntropyStep : std::uint8_t { kWhole, kTerms, kRelative, kLosses };

struct CrossEntropy {
  CrossEntropyStep step = CrossEntropyStep::kWhole;
  Logits logits;
  float* maximum = nullptr;  ///< (rows): each row's maximum over this rank's columns
  /// (rows): a copy of `maximum`, which an all-reduce replaces by the maximum over all ranks.
  float* all_maximum = nullptr;
  /// The terms of each row, (2 or 3, rows): sum of exp(x - m), target's logit and, for label
  /// smoothing, sum of x - m. m is reference(maximum) for this rank's maximum; after kRelative, for
  /// the maximum over all ranks.
  float* terms = nullptr;
  float* losses = nullptr;        ///< (rows): cross-entropy loss of each row
  double* log_sum_exp = nullptr;  ///< (rows): the log-sum-exp of each row
};

struct CrossEntropyBackward {
  Logits logits;
  const double* log_sum_exp = nullptr;
  const float* of_row = nullptr;  ///< gradient of each row's loss; nullptr means ones
  std::int64_t of_row_stride = 1;
  void* gradient = nullptr;  ///< gradient of the logits; can be in the logits' memory
  std::int64_t gradient_stride = 0;
};

constexpr int kCrossEntropyThreads = 512;  // number of threads of a block, for one row of logits

/// Returns exp(x), with an error of at most |x| + 2 ulp on a GPU. Callers pass no x far above 0, so
/// large errors affect only small terms of sums.
TESSERA_HOST_DEVICE inline float fast_exp(float x) {
#ifdef __CUDA_ARCH__
  return __expf(x);
#else
  return std::exp(x);
#endif
}

constexpr float kNoMaximum = -std::numeric_limits<float>::infinity();

/// Returns the number to subtract from logits before exp(): the row's maximum, or 0 if the maximum
/// is -inf, because -inf - -inf would be NaN.
TESSERA_HOST_DEVICE inline float reference(float maximum) {
  return maximum == kNoMaximum ? 0.0F : maximum;
}

/// Returns the factor that converts a sum of exp(x - maximum) to a sum of exp(x - all), where `all`
/// is at least `maximum`.
TESSERA_HOST_DEVICE inline float rescale(float maximum, float all) {
  return maximum == kNoMaximum ? 0.0F : fast_exp(maximum - all);
}

/// Returns the address of a row of logits. A tensor without columns is at nullptr, to which a CPU
/// must not add an offset. On a GPU, the check would cost registers.
template <class T>
TESSERA_HOST_DEVICE T* row_of(T* data, std::int64_t row, std::int64_t stride) {
#ifndef __CUDA_ARCH__
  if (data == nullptr) {
    return nullptr;
  }
#endif
  return data + row * stride;
}

/// Calls body.operator()<N>(i) for each vector of N logits that is aligned to 16 bytes, and
/// body.operator()<1>(i) for each logit before and after these vectors.
template <class T, int N, class Team, class Body>
TESSERA_HOST_DEVICE void for_each_vector(const T* row, std::int64_t size, const Team& team,
                                         Body&& body) {
  const auto past =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(row) / sizeof(T)) % N;
  const std::int64_t before = past == 0 ? 0 : N - past;
  const std::int64_t head = before < size ? before : size;
  const std::int64_t vectors = (size - head) / N;
  for (std::int64_t i = team.first(); i < vectors; i += team.width()) {
    body.template operator()<N>(head + i * N);
  }
  for (std::int64_t i = team.first(); i < size - vectors * N; i += team.width()) {
    body.template operator()<1>(i < head ? i : i + vectors * N);
  }
}

/// The maximum and the sums over a row of logits, computed in one pass.
struct RowSums {
  float maximum = kNoMaximum;
  float sum = 0;    ///< sum of exp(x - reference(maximum)) over the row's logits x
  float total = 0;  ///< sum of (x - the row's first logit) over the row

  /// Adds N logits to `maximum` and `sum`. A NaN among the logits makes `sum` NaN, but not
  /// `maximum`.
  template <int N>
  TESSERA_HOST_DEVICE void add(const Floats<N>& x) {
    float top = maximum;
    for (int k = 0; k < N; ++k) {
      top = std::fmax(top, x.at[k]);
    }
    if (top > maximum) {
      sum *= rescale(maximum, top);
      maximum = top;
    }
    const float from = reference(maximum);
    for (int k = 0; k < N; ++k) {
      sum += fast_exp(x.at[k] - from);
    }
  }
};

/// Computes the sums of a row of logits by one team of threads. RowSums::total is relative to the
/// row's first logit, so that large logits do not lose precision.
template <class T, int N, class Team>
TESSERA_HOST_DEVICE RowSums sums_of_row(const Logits& p, std::int64_t row, Team& team) {
  const T* x = row_of(static_cast<const T*>(p.data), row, p.stride);
  const bool smooth = p.label_smoothing > 0;
  const float first = smooth && p.columns > 0 ? static_cast<float>(x[0]) : 0.0F;
  const float pivot = first - first == 0.0F ? first : 0.0F;
  RowSums own;
  for_each_vector<T, N>(x, p.columns, team, [&]<int M>(std::int64_t i) {
    const Floats<M> v = load<M>(x + i, M);
    own.add(v);
    if (smooth) {
      for (int k = 0; k < M; ++k) {
        own.total += v.at[k] - pivot;
      }
    }
  });
  RowSums all;
  all.maximum = team.max(own.maximum);
  all.sum = team.sum(own.sum * rescale(own.maximum, all.maximum));
  if (smooth) {
    all.total =
        team.sum(own.total) + static_cast<float>(p.columns) * (pivot - reference(all.maximum));
  }
  return all;
}

/// Writes the loss of a row of logits. `sum` (of exponentials), `target` (the target's logit) and
/// `total` (of logits) include all ranks and are relative to `maximum`.
TESSERA_HOST_DEVICE inline void write_loss(const CrossEntropy& p, std::int64_t row, float maximum,
                                           float sum, float target, float total) {
  const Logits& in = p.logits;
  const float log_sum = std::log(sum);
  const double log_sum_exp = static_cast<double>(log_sum) + maximum;
  float loss = log_sum - (1.0F - in.label_smoothing) * target;
  if (in.label_smoothing > 0) {
    loss -= in.label_smoothing / static_cast<float>(in.vocabulary) * total;
  }
  if (in.z_loss > 0) {
    loss += in.z_loss * static_cast<float>(log_sum_exp * log_sum_exp);
  }
  p.losses[row] = in.is_ignored(row) ? 0.0F : loss;
  p.log_sum_exp[row] = log_sum_exp;
}

template <class T>
TESSERA_HOST_DEVICE void write_sums(const CrossEntropy& p, std::int64_t row, const RowSums& sums) {
  const Logits& in = p.logits;
  const auto* x = static_cast<const T*>(in.data);
  const float target =
      in.has_target(row) ? static_cast<float>(x[row * in.stride + in.target(row)]) : 0.0F;
  if (p.step == CrossEntropyStep::kWhole) {
    return write_loss(p, row, sums.maximum, sums.sum, target - sums.maximum, sums.total);
  }
  p.maximum[row] = sums.maximum;
  p.all_maximum[row] = sums.maximum;
  p.terms[row] = sums.sum;
  p.terms[in.rows + row] = target;
  if (in.label_smoothing > 0) {
    p.terms[2 * in.rows + row] = sums.total;
  }
}

/// Runs the cross-entropy steps kRelative and kLosses for a row of logits, on one thread.
TESSERA_HOST_DEVICE inline void finish_row(const CrossEntropy& p, std::int64_t row) {
  const Logits& in = p.logits;
  const bool smooth = in.label_smoothing > 0;
  const float all = p.all_maximum[row];
  float& sum = p.terms[row];
  float& target = p.terms[in.rows + row];
  if (p.step == CrossEntropyStep::kLosses) {
    return write_loss(p, row, all, sum, target, smooth ? p.terms[2 * in.rows + row] : 0.0F);
  }
  const float own = p.maximum[row];
  sum *= rescale(own, all);
  target = in.has_target(row) ? target - all : 0.0F;
  if (smooth && in.columns > 0) {
    p.terms[2 * in.rows + row] += static_cast<float>(in.columns) * (reference(own) - all);
  }
}

/// A double, stored as the sum of two floats. A kernel subtracts both floats from a logit, so that
/// the difference is precise even if the double is large.
struct TwoFloats {
  float high, low;
};

TESSERA_HOST_DEVICE inline TwoFloats two_floats(double x) {
  const auto high = static_cast<float>(x);
  const auto rest = static_cast<float>(x - high);
  // For an infinity the second float is 0, because inf - inf would be NaN.
  return {high, rest == rest ? rest : 0.0F};
}

/// Coefficients of the gradient of a row of logits. The gradient is `softmax` * softmax(row) -
/// `all`, minus `target` at the target's column.
struct RowScales {
  float softmax, target, all;
};

TESSERA_HOST_DEVICE inline RowScales scales_of_row(const CrossEntropyBackward& p,
                                                   std::int64_t row) {
  const Logits& in = p.logits;
  const float factor = p.of_row != nullptr ? p.of_row[row * p.of_row_stride] : 1.0F;
  return {std::fma(factor, 2.0F * in.z_loss * static_cast<float>(p.log_sum_exp[row]), factor),
          factor * (1.0F - in.label_smoothing),
          factor * in.label_smoothing / static_cast<float>(in.vocabulary)};
}

/// Writes the gradient of a row of logits: g * ((1 + 2 z lse) softmax - (1 - e) target - e / V)
/// with g of_row, z z_loss, e label_smoothing and V vocabulary. Logits and gradient may share
/// memory.
template <class T, int N, class Team>
TESSERA_HOST_DEVICE void cross_entropy_backward_row(const CrossEntropyBackward& p, std::int64_t row,
                                                    const Team& team) {
  const Logits& in = p.logits;
  const T* x = row_of(static_cast<const T*>(in.data), row, in.stride);
  T* gradient = row_of(static_cast<T*>(p.gradient), row, p.gradient_stride);
  if (in.is_ignored(row)) {
    return for_each_vector<T, N>(gradient, in.columns, team, [&]<int M>(std::int64_t i) {
      store(gradient + i, Floats<M>{}, M);
    });
  }
  const TwoFloats lse = two_floats(p.log_sum_exp[row]);
  const RowScales scales = scales_of_row(p, row);
  const std::int64_t target = in.target(row);
  for_each_vector<T, N>(x, in.columns, team, [&]<int M>(std::int64_t i) {
    Floats<M> v = load<M>(x + i, M);
    for (int k = 0; k < M; ++k) {
      v.at[k] = std::fma(scales.softmax, fast_exp(v.at[k] - lse.high - lse.low), -scales.all);
    }
    if (target >= i && target < i + M) {
      for (int k = 0; k < M; ++k) {
        v.at[k] -= i + k == target ? scales.target : 0.0F;
      }
    }
    store(gradient + i, v, M);
  });
}

/// Multiplies tensor x by a number in device memory. T, the element type of the result `out`, can
/// differ from the type of x.
struct Scale {
  const void* x = nullptr;
  bool x_is_float = false;  ///< whether x is fp32; otherwise x has the type of `out`
  const float* factor = nullptr;
  std::int64_t size = 0;
  void* out = nullptr;
};

template <class X, class T, int N>
TESSERA_HOST_DEVICE void scale_elements(const Scale& p, std::int64_t first, std::int64_t step) {
  const float factor = *p.factor;
  for (std::int64_t i = first * N; i < p.size; i += step * N) {
    Floats<N> v = load<N>(static_cast<const X*>(p.x) + i, p.size - i);
    for (int k = 0; k < N; ++k) {
      v.at[k] *= factor;
    }
    store(static_cast<T*>(p.out) + i, v, p.size - i);
  }
}

/// Whether a cross-entropy kernel can use vectors of 16 bytes: for each row, the addresses in the
/// logits and in the gradient must be equal modulo 16.
inline bool is_aligned(const CrossEntropyBackward& call, Element type) {
  const auto apart = reinterpret_cast<std::uintptr_t>(call.logits.data) -
                     reinterpret_cast<std::uintptr_t>(call.gradient);
  return apart % kVectorBytes == 0 &&
         (call.logits.stride - call.gradient_stride) * bytes_of(type) % kVectorBytes == 0;
}
inline bool is_aligned(const Scale& call, Element type) {
  return is_aligned(call.x, 1, 0, type) && is_aligned(call.out, 1, 0, type);
}

}  // namespace tessera::kernels
