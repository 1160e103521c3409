// The 2-norm of many tensors together: each chunk has a block that sums the squares of the chunk,
// and one more block adds the results. Sums are computed in fp64, so that no square overflows, and
// in an order that depends on sizes only.
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
  double* sums = nullptr;  ///< one sum of squares for each chunk
};

/// The sums of squares of chunks, for three kinds of tensors, one kind after another (GradTerms):
/// tensors that this rank includes in the norm, plain tensors, and copies that another rank
/// includes.
struct SumKinds {
  const double* sums = nullptr;
  std::int64_t ends[3] = {};  ///< for each kind, the index after its last sum
  /// (2): the number that is added over the ranks, and the sum of the plain tensors. The first
  /// number is made non-finite if a copy that another rank includes has a non-finite value here, so
  /// that all ranks see the value.
  double* out = nullptr;
};

/// Computes the norm and the clip factor from sums that were added over the ranks.
struct ClipNorm {
  /// The values of SumKinds::out after they were added over the ranks.
  const double* sums = nullptr;
  double max_norm = 0;
  double* norm_and_factor = nullptr;  ///< (3): the norm, the clip factor, and the factor of a step,
                                      ///< which is NaN if the norm is not finite
  float* norm = nullptr;              ///< the norm, rounded to fp32
};

/// The sum of squares over the vectors number `first`, `first` + `step` and so on of `n` elements.
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

/// Adds the sums of the three kinds. Executed by a team of threads; Team::sum() has the same bits
/// in each thread.
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
    // The difference uncounted - uncounted is 0 if the number is finite, otherwise NaN.
    call.out[0] = of_kinds[0] + (uncounted - uncounted == 0.0 ? 0.0 : uncounted);
    call.out[1] = of_kinds[1];
  }
}

/// Computes the norm and the clip factor. 1e-6 is added as in PyTorch. As in PyTorch, a NaN norm
/// gives the clip factor NaN, and an infinite norm gives 0.
TESSERA_HOST_DEVICE inline void clip_norm(const ClipNorm& call) {
  const double norm = std::sqrt(call.sums[0] + call.sums[1]);
  const double factor = call.max_norm / (norm + 1e-6);
  call.norm_and_factor[0] = norm;
  call.norm_and_factor[1] = factor > 1.0 ? 1.0 : factor;
  call.norm_and_factor[2] = call.norm_and_factor[1] + (norm - norm);
  *call.norm = static_cast<float>(norm);
}

}  // namespace tessera::kernels
