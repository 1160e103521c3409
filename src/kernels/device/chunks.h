// Many tensors in one launch: a list of pieces that are split into chunks, one block for each
// chunk.
#pragma once

#include <cstdint>
#include <limits>

#include "device/vectors.h"

namespace tessera::kernels {

/// A list of at most `kMost` pieces; a piece must have a numel(). Plain arrays, because a kernel
/// receives the list by value, with at most 4 KiB of arguments.
template <class Piece, int kMost, std::int64_t kNumel>
struct Chunked {
  static constexpr std::int64_t kChunk = kNumel;  ///< maximum number of elements in a chunk; only
                                                  ///< the last chunk of a piece may have fewer

  int count = 0;              ///< number of pieces
  std::int32_t chunks = 0;    ///< number of chunks of all pieces
  std::int32_t first[kMost];  ///< number of each piece's first chunk
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

/// A range of elements [begin, end) of a piece.
struct Chunk {
  int piece;
  std::int64_t begin;
  std::int64_t end;
};

template <class Piece, int kMost, std::int64_t kNumel>
TESSERA_HOST_DEVICE Chunk chunk_of(const Chunked<Piece, kMost, kNumel>& list, std::int32_t number) {
  // Binary search for the piece of chunk `number`: the last piece whose first chunk is at or before
  // `number`.
  int piece = 0;
  for (int end = list.count; end - piece > 1;) {
    const int middle = (piece + end) / 2;
    (list.first[middle] <= number ? piece : end) = middle;
  }
  const std::int64_t begin = (number - list.first[piece]) * kNumel;
  const std::int64_t numel = list.pieces[piece].numel();
  return {piece, begin, begin + kNumel < numel ? begin + kNumel : numel};
}

/// Whether `data` is aligned for accesses of 16 bytes.
TESSERA_HOST_DEVICE inline bool is_vector(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % kVectorBytes == 0;
}

}  // namespace tessera::kernels
