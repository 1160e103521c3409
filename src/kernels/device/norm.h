// The 2-norm of many tensors together: one block sums the squares of each chunk, and another block
// sums the results. In fp64, so that no square overflows, and in an order that depends on sizes
// only.
#pragma once

#include "device/chunks.h"

namespace tessera::kernels {

struct NormPiece {
  const void* data = nullptr;
  std::int64_t size = 0;

  TESSERA_HOST_DEVICE std::int64_t numel() const { return size; }
};

struct SquareSums {
  Chunked<NormPiece, 200, 65536> list;
  double* sums = nullptr;  ///< one sum for each chunk
};

/// Sums of chunks for the three kinds of tensors, one after another (GradTerms): tensors that this
/// rank counts, plain ones, and copies that another rank counts.
struct SumKinds {
  const double* sums = nullptr;
  std::int64_t ends[3] = {};  ///< end of each kind's sums
  /// (2): the number that is summed over the ranks, and the sum of the plain tensors. The first is
  /// made non-finite if a tensor that this rank does not count has a non-finite value, so that all
  /// ranks see it.
  double* out = nullptr;
};

/// Computes the norm and the clip factor from sums that were added over the ranks.
struct ClipNorm {
  const double* sums = nullptr;  ///< the result in SumKinds::out, added over the ranks
  double max_norm = 0;
  double* norm_and_factor = nullptr;  ///< (3): the norm, the clip factor, and the factor of a step,
                                      ///< which is NaN if the norm is not finite
  float* norm = nullptr;              ///< the norm, rounded to fp32
};

/// The sum of squares over the vectors `first`, `first` + `step` and so on of `n` elements.
template <class T, int N>
TESSERA_HOST_DEVICE double squares_of_range(const T* data, std::int64_t n, std::int64_t first,
                                            std::int64_t step) {
  double sum = 0;
  for (std::int64_t i = first * N; i < n; i += step * N) {
    const Floats<N> values = load<N>(data + i, n - i);
    for (int k = 0; k < N; ++k) {
      const double value = values.at[k];
      sum = std::fma(value, value, sum);
    }
  }
  return sum;
}

template <class T>
TESSERA_HOST_DEVICE double squares_of_chunk(const SquareSums& call, std::int32_t number,
                                            std::int64_t first, std::int64_t step) {
  const Chunk chunk = chunk_of(call.list, number);
  const NormPiece& piece = call.list.pieces[chunk.piece];
  const T* data = static_cast<const T*>(piece.data) + chunk.begin;
  const std::int64_t n = chunk.end - chunk.begin;
  return is_vector(data) ? squares_of_range<T, kVectorBytes / sizeof(T)>(data, n, first, step)
                         : squares_of_range<T, 1>(data, n, first, step);
}

/// Sums the three kinds; executed by a team of threads, whose sum() has the same bits in each
/// thread.
template <class Team>
TESSERA_HOST_DEVICE void sum_kinds(const SumKinds& call, Team& team) {
  double of_kinds[3];
  std::int64_t begin = 0;
  for (int kind = 0; kind < 3; ++kind) {
    double sum = 0;
    for (std::int64_t i = begin + team.first(); i < call.ends[kind]; i += team.width()) {
      sum += call.sums[i];
    }
    of_kinds[kind] = team.sum(sum);
    begin = call.ends[kind];
  }
  if (team.first() == 0) {
    const double uncounted = of_kinds[1] + of_kinds[2];
    // uncounted - uncounted is 0 if the number is finite.
    call.out[0] = of_kinds[0] + (uncounted - uncounted == 0.0 ? 0.0 : uncounted);
    call.out[1] = of_kinds[1];
  }
}

/// 1e-6 as in PyTorch. As in PyTorch, a NaN norm gives the clip factor NaN, and an infinite norm 0.
TESSERA_HOST_DEVICE inline void clip_norm(const ClipNorm& call) {
  const double norm = std::sqrt(call.sums[0] + call.sums[1]);
  const double factor = call.max_norm / (norm + 1e-6);
  call.norm_and_factor[0] = norm;
  call.norm_and_factor[1] = factor > 1.0 ? 1.0 : factor;
  call.norm_and_factor[2] = call.norm_and_factor[1] + (norm - norm);
  *call.norm = static_cast<float>(norm);
}

}  // namespace tessera::kernels
