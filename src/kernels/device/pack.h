// Copies of many tensors in one launch, from any of the types to any: between parameters and the
// flat buffers that collectives send.
#pragma once

#include "device/chunks.h"

namespace tessera::kernels {

/// `rows` of `size` elements, which begin `..._stride` elements apart.
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
  Element to;  ///< what elements become
};

/// Whether no vector of N elements reaches over the end of a row, and all are aligned.
template <class From, class To, int N>
TESSERA_HOST_DEVICE bool has_vectors(const PackPiece& p) {
  const auto rows_fit = [&](std::int64_t stride, std::int64_t bytes) {
    return stride * bytes % kVectorBytes == 0;
  };
  return is_vector(p.from) && is_vector(p.to) &&
         (p.rows == 1 || (p.size % N == 0 && rows_fit(p.from_stride, sizeof(From)) &&
                          rows_fit(p.to_stride, sizeof(To))));
}

/// Vectors `first`, `first` + `step` and so on of the elements [begin, end).
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

/// A chunk, by the threads `first` to `step` - 1.
template <class From, class To>
TESSERA_HOST_DEVICE void copy_chunk(const Pack& call, std::int32_t number, std::int64_t first,
                                    std::int64_t step) {
  constexpr int kWide = kVectorBytes / sizeof(To);  // each of a warp's writes fills what it touches
  const Chunk chunk = chunk_of(call.list, number);
  const PackPiece& piece = call.list.pieces[chunk.piece];
  if (has_vectors<From, To, kWide>(piece)) {
    copy_elements<From, To, kWide>(piece, chunk.begin, chunk.end, first, step);
  } else {
    copy_elements<From, To, 1>(piece, chunk.begin, chunk.end, first, step);
  }
}

}  // namespace tessera::kernels
