// Kernels that process many tensors in one launch: copies with type conversion to flat buffers of
// collectives, and 2-norms. A thread block processes one chunk of a tensor.
#pragma once

#include <cstdint>
#include <limits>

#include "device/vectors.h"

namespace tessera::kernels {

/// At most `kMost` pieces (tensors, or parts of tensors). A kernel receives the list by value, in
/// at most 4 KiB, so the arrays have fixed sizes. Piece must have numel().
template <class Piece, int kMost, std::int64_t kNumel>
struct Chunked {
  /// Number of elements in a chunk. The last chunk of a piece can be shorter.
  static constexpr std::int64_t kChunk = kNumel;

  int count = 0;
  std::int32_t chunks = 0;
  std::int32_t first[kMost];  ///< index of the first chunk of each piece
  Piece pieces[kMost];

  /// Adds a piece, which must not be empty. Returns false, without effect, if the list is full.
  bool add(const Piece& piece) {
    const std::int64_t more = divide_up(piece.numel(), kChunk);
    if (count == kMost || chunks + more > std::numeric_limits<std::int32_t>::max()) {
      return false;
    }
    first[count] = chunks;
    pieces[count++] = piece;
    chunks += static_cast<std::int32_t>(more);
    return true;
  }
};

/// A chunk: the elements [begin, end) of the piece with index `piece`.
struct Chunk {
  int piece;
  std::int64_t begin;
  std::int64_t end;
};

template <class Piece, int kMost, std::int64_t kNumel>
TESSERA_HOST_DEVICE Chunk chunk_of(const Chunked<Piece, kMost, kNumel>& list, std::int32_t number) {
  int piece = 0;
  for (int end = list.count; end - piece > 1;) {
    const int middle = (piece + end) / 2;
    (list.first[middle] <= number ? piece : end) = middle;
  }
  const std::int64_t begin = (number - list.first[piece]) * kNumel;
  const std::int64_t numel = list.pieces[piece].numel();
  return {piece, begin, begin + kNumel < numel ? begin + kNumel : numel};
}

TESSERA_HOST_DEVICE inline bool is_vector(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % kVectorBytes == 0;
}

/// A copy of `rows` rows of `size` elements. The rows begin `from_stride` elements apart in the
/// source, and `to_stride` elements apart in the destination.
struct PackPiece {
  const void* from = nullptr;
  void* to = nullptr;
  std::int64_t rows = 0;
  std::int64_t size = 0;
  std::int64_t from_stride = 0;
  std::int64_t to_stride = 0;

  TESSERA_HOST_DEVICE std::int64_t numel() const { return rows * size; }
};

struct Pack {
  Chunked<PackPiece, 64, 16384> list;
  Element to;  ///< element type of the destinations
};

/// Whether all vectors of N elements are aligned in both tensors of a copy, and none crosses a
/// row's end.
template <class From, class To, int N>
TESSERA_HOST_DEVICE bool has_vectors(const PackPiece& p) {
  const auto rows_fit = [&](std::int64_t stride, std::int64_t bytes) {
    return stride * bytes % kVectorBytes == 0;
  };
  return is_vector(p.from) && is_vector(p.to) &&
         (p.rows == 1 || (p.size % N == 0 && rows_fit(p.from_stride, sizeof(From)) &&
                          rows_fit(p.to_stride, sizeof(To))));
}

/// Copies the vectors first, first + step, first + 2 step, ... of the elements [begin, end).
template <class From, class To, int N>
TESSERA_HOST_DEVICE void copy_elements(const PackPiece& p, std::int64_t begin, std::int64_t end,
                                       std::int64_t first, std::int64_t step) {
  const auto* const from = static_cast<const From*>(p.from);
  auto* const to = static_cast<To*>(p.to);
  for (std::int64_t i = begin + first * N; i < end; i += step * N) {
    const std::int64_t row = p.rows == 1 ? 0 : i / p.size;
    const std::int64_t column = i - row * p.size;
    store(to + row * p.to_stride + column, load<N>(from + row * p.from_stride + column, end - i),
          end - i);
  }
}

template <class From, class To>
TESSERA_HOST_DEVICE void copy_chunk(const Pack& call, std::int32_t number, std::int64_t first,
                                    std::int64_t step) {
  constexpr int kWide = kVectorBytes / sizeof(To);
  const Chunk chunk = chunk_of(call.list, number);
  const PackPiece& piece = call.list.pieces[chunk.piece];
  if (has_vectors<From, To, kWide>(piece)) {
    copy_elements<From, To, kWide>(piece, chunk.begin, chunk.end, first, step);
  } else {
    copy_elements<From, To, 1>(piece, chunk.begin, chunk.end, first, step);
  }
}

// Kernels of the 2-norm: a thread block sums the squares of each chunk, and one more block adds
// these sums. The sums are fp64, and the order depends on sizes only.

struct NormPiece {
  const void* data = nullptr;
  std::int64_t size = 0;

  TESSERA_HOST_DEVICE std::int64_t numel() const { return size; }
};

struct SquareSums {
  Chunked<NormPiece, 200, 65536> list;
  double* sums = nullptr;  ///< one sum of squares for each chunk
};

/// Adds the chunks' sums of squares for owned gradients (this rank adds these to the norm), plain
/// tensors, and copies (another rank adds these to the norm).
struct SumKinds {
  const double* sums = nullptr;
  std::int64_t ends[3] = {};  ///< ends of the three ranges of `sums`
  /// out[0]: the sum of squares of owned gradients, to be all-reduced; not finite if a plain tensor
  /// or copy is not. out[1]: the sum of squares of plain tensors.
  double* out = nullptr;
};

/// Computes the gradient norm and the clip factor from `sums`, which is SumKinds::out after the
/// all-reduce of out[0].
struct ClipNorm {
  const double* sums = nullptr;
  double max_norm = 0;
  /// The norm, the clip factor, and the clip factor for AdamW: NaN if the norm is NaN or infinite.
  double* norm_and_factor = nullptr;
  float* norm = nullptr;
};

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
    // A NaN or infinite `uncounted` makes out[0] NaN or infinite. A finite `uncounted` adds 0.
    call.out[0] = of_kinds[0] + (uncounted - uncounted == 0.0 ? 0.0 : uncounted);
    call.out[1] = of_kinds[1];
  }
}

/// Computes the gradient norm and the clip factor. As in PyTorch, 1e-6 is added to the norm. A NaN
/// norm gives the factor NaN; an infinite norm gives 0.
TESSERA_HOST_DEVICE inline void clip_norm(const ClipNorm& call) {
  const double norm = std::sqrt(call.sums[0] + call.sums[1]);
  const double factor = call.max_norm / (norm + 1e-6);
  call.norm_and_factor[0] = norm;
  call.norm_and_factor[1] = factor > 1.0 ? 1.0 : factor;
  call.norm_and_factor[2] = call.norm_and_factor[1] + (norm - norm);
  *call.norm = static_cast<float>(norm);
}

}  // namespace tessera::kernels
