// Copies many tensors in one launch, between any element types. Used to copy parameters to the flat
// buffers that collectives send, and back.
#pragma once

#include "device/chunks.h"

namespace tessera::kernels {

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
  Element to;  ///< element type of all destinations
};

/// Whether no vector of N elements crosses the end of a row, and all vectors are aligned.
template <class From, class To, int N>
TESSERA_HOST_DEVICE bool has_vectors(const PackPiece& p) {
  const auto rows_fit = [&](std::int64_t stride, std::int64_t bytes) {
    return stride * bytes % kVectorBytes == 0;
  };
  return is_vector(p.from) && is_vector(p.to) &&
         (p.rows == 1 || (p.size % N == 0 && rows_fit(p.from_stride, sizeof(From)) &&
                          rows_fit(p.to_stride, sizeof(To))));
}

/// Copies the vectors number `first`, `first` + `step` and so on of the elements [begin, end).
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

/// Copies a chunk. Called by thread number `first` of `step` threads.
template <class From, class To>
TESSERA_HOST_DEVICE void copy_chunk(const Pack& call, std::int32_t number, std::int64_t first,
                                    std::int64_t step) {
  // With vectors of this width the writes of a warp fill whole memory segments.
  constexpr int kWide = kVectorBytes / sizeof(To);
  const Chunk chunk = chunk_of(call.list, number);
  const PackPiece& piece = call.list.pieces[chunk.piece];
  if (has_vectors<From, To, kWide>(piece)) {
    copy_elements<From, To, kWide>(piece, chunk.begin, chunk.end, first, step);
  } else {
    copy_elements<From, To, 1>(piece, chunk.begin, chunk.end, first, step);
  }
}

}  // namespace tessera::kernels
