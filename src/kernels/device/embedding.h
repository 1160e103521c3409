// Look-up of rows in an embedding table or a rank's shard of the table, the gradient, and a check
// of indices on the device without waiting for the device.
#pragma once

#include <algorithm>

#include "device/vectors.h"

namespace tessera::kernels {

/// A shard of an embedding table: `rows` dense rows of the table, from row `first_row` on. The
/// table has `total_rows` rows.
struct Embedding {
  const void* table = nullptr;
  const std::int64_t* indices = nullptr;
  std::int64_t count = 0;  ///< number of indices that are looked up
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
  std::int64_t total_rows = 0;
  std::int64_t size = 0;  ///< number of elements in a row of the table
  void* out = nullptr;    ///< (count, size): the rows that were looked up in the table
};

/// Arguments of the embedding gradient kernels. Each tile of kTileSlots sorted indices adds the
/// gradients of equal indices. A second launch adds the sums of tiles. The order is fixed, so every
/// run gives the same bits.
struct EmbeddingBackward {
  const void* grad = nullptr;             ///< (count, size): gradient of the looked-up rows
  const std::int64_t* indices = nullptr;  ///< the indices in sorted order
  /// The position of each sorted index in the list of unsorted indices.
  const std::int64_t* positions = nullptr;
  std::int64_t count = 0;
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
  std::int64_t size = 0;
  void* weight_grad = nullptr;  ///< (rows, size): gradient of the table; zeros before the launch
  /// (tiles, 2, size): for each tile, the partial sums of two runs of equal indices: the run that
  /// began before the tile, and the run that continues after the tile.
  float* partial = nullptr;

  TESSERA_HOST_DEVICE bool goes_on_at(std::int64_t slot) const {
    return slot > 0 && slot < count && indices[slot] == indices[slot - 1];
  }
  /// Returns the table row of the sorted index at position `slot`, relative to the shard's first
  /// row. Results outside of [0, rows) belong to another rank.
  TESSERA_HOST_DEVICE std::int64_t row(std::int64_t slot) const {
    return indices[slot] - first_row;
  }
  TESSERA_HOST_DEVICE bool has(std::int64_t slot) const {
    return row(slot) >= 0 && row(slot) < rows;
  }
};

struct CheckIndices {
  const std::int64_t* indices = nullptr;
  std::int64_t count = 0;
  std::int64_t size = 0;
  std::int64_t ignored = 0;  ///< the ignored index is valid, even if outside of [0, size)

  TESSERA_HOST_DEVICE bool is_right(std::int64_t i) const {
    return (indices[i] >= 0 && indices[i] < size) || indices[i] == ignored;
  }
};

constexpr std::int64_t kTileSlots = 32;

inline std::int64_t embedding_tiles(std::int64_t count) {
  return (count + kTileSlots - 1) / kTileSlots;
}

/// Copies the vectors at the indices `first`, `first` + `step`, ... of an embedding row, or writes
/// zeros if another rank has the row.
template <class T, int N>
TESSERA_HOST_DEVICE void embedding_row(const Embedding& p, std::int64_t position,
                                       std::int64_t first, std::int64_t step) {
  const std::int64_t row = p.indices[position] - p.first_row;
  const bool is_here = row >= 0 && row < p.rows;
  const T* from = static_cast<const T*>(p.table) + (is_here ? row * p.size : 0);
  T* to = static_cast<T*>(p.out) + position * p.size;
  const std::int64_t vectors = N > 1 ? p.size / N : 0;
  for (std::int64_t i = first; i < vectors; i += step) {
    reinterpret_cast<Vector*>(to)[i] =
        is_here ? reinterpret_cast<const Vector*>(from)[i] : Vector{};
  }
  for (std::int64_t i = vectors * N + first; i < p.size; i += step) {
    to[i] = is_here ? from[i] : T(0.0F);
  }
}

template <int N>
TESSERA_HOST_DEVICE void add(Floats<N>& sum, const Floats<N>& term) {
  for (int k = 0; k < N; ++k) {
    sum.at[k] += term.at[k];
  }
}

template <class T, int N>
TESSERA_HOST_DEVICE void write_row(const EmbeddingBackward& p, std::int64_t slot, std::int64_t i,
                                   const Floats<N>& sum) {
  if (p.has(slot)) {
    store(static_cast<T*>(p.weight_grad) + p.row(slot) * p.size + i, sum, p.size - i);
  }
}

/// Sums elements [i, i + N) of the gradient rows of each distinct index in a tile.
template <class T, int N>
TESSERA_HOST_DEVICE void embedding_backward_tile(const EmbeddingBackward& p, std::int64_t tile,
                                                 std::int64_t i) {
  constexpr int kAtOnce = 4;  // number of gradient rows that a thread loads at once
  const std::int64_t begin = tile * kTileSlots;
  const std::int64_t end = begin + kTileSlots < p.count ? begin + kTileSlots : p.count;
  float* const from_before = p.partial + tile * 2 * p.size + i;
  const T* grad = static_cast<const T*>(p.grad) + i;
  bool began_before = p.goes_on_at(begin);
  Floats<N> sum{};
  for (std::int64_t first = begin; first < end; first += kAtOnce) {
    Floats<N> terms[kAtOnce];
    for (int k = 0; k < kAtOnce; ++k) {
      const std::int64_t slot = first + k;
      terms[k] = slot < end && p.has(slot) ? load<N>(grad + p.positions[slot] * p.size, p.size - i)
                                           : Floats<N>{};
    }
    for (int k = 0; k < kAtOnce && first + k < end; ++k) {
      const std::int64_t slot = first + k;
      add(sum, terms[k]);
      const bool goes_on = p.goes_on_at(slot + 1);
      if (goes_on && slot + 1 < end) {
        continue;
      }
      if (began_before) {
        store(from_before, sum, p.size - i);
      } else if (goes_on) {
        store(from_before + p.size, sum, p.size - i);
      } else {
        write_row<T>(p, slot, i, sum);
      }
      sum = Floats<N>{};
      began_before = false;
    }
  }
}

/// Adds the partial sums of several tiles for a run of equal indices. The run begins in tile `tile`
/// and continues in later tiles.
template <class T, int N>
TESSERA_HOST_DEVICE void embedding_backward_row(const EmbeddingBackward& p, std::int64_t tile,
                                                std::int64_t i) {
  const std::int64_t begin = tile * kTileSlots;
  const std::int64_t next = begin + kTileSlots;
  if (!p.goes_on_at(next)) {
    return;
  }
  // The run of equal indices began in an earlier tile. The thread of that tile adds the run's sums.
  if (p.goes_on_at(begin) && p.indices[begin] == p.indices[next]) {
    return;
  }
  Floats<N> sum = load<N>(p.partial + (tile * 2 + 1) * p.size + i, p.size - i);
  for (std::int64_t slot = next; slot < p.count && p.indices[slot] == p.indices[next];
       slot += kTileSlots) {
    add(sum, load<N>(p.partial + slot / kTileSlots * 2 * p.size + i, p.size - i));
  }
  write_row<T>(p, next, i, sum);
}

/// Whether all rows of the table and the result can be accessed by vectors of 16 bytes.
inline bool is_aligned(const Embedding& call, Element type) {
  return is_aligned(call.table, /*rows=*/2, call.size, type) &&
         is_aligned(call.out, /*rows=*/2, call.size, type);
}
inline bool is_aligned(const EmbeddingBackward& call, Element type) {
  return is_aligned(call.grad, /*rows=*/2, call.size, type) &&
         is_aligned(call.weight_grad, /*rows=*/2, call.size, type);
}

}  // namespace tessera::kernels
