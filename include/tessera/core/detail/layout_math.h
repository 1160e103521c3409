// Computes which elements of a distributed tensor a rank stores.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/core/detail/layout.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

// In this header, `sizes` are the global sizes of a tensor. `coordinate` is a rank's position in
// the mesh, with one index per mesh dimension. All functions are pure and thread safe. Throws
// Error for a wrong length of `sizes` or `coordinate`.

/// Returns the sizes of the local tensor of the rank at `coordinate`.
std::vector<std::int64_t> local_sizes(const Layout& layout, std::span<const std::int64_t> sizes,
                                      std::span<const std::int64_t> coordinate);

/// Returns the local size of dimension `tensor_dim`, whose global size is `size`, on the rank at
/// `coordinate`. The arguments are not checked.
std::int64_t local_size(const Layout& layout, int tensor_dim, std::int64_t size,
                        std::span<const std::int64_t> coordinate);

/// Returns the number of elements of the local tensor of the rank at `coordinate`.
std::int64_t local_numel(const Layout& layout, std::span<const std::int64_t> sizes,
                         std::span<const std::int64_t> coordinate);

/// A block of the global tensor that is stored on one rank: a range of indices in every dimension.
struct Box {
  std::vector<std::int64_t> global_offset;  ///< block's first index in the global tensor
  /// Block's first index in each dimension of the local tensor of the rank that stores the block.
  std::vector<std::int64_t> local_offset;
  std::vector<std::int64_t> sizes;
  friend bool operator==(const Box&, const Box&) = default;
};

/// Returns the non-empty blocks of the global tensor that the rank at `coordinate` stores, in
/// row-major order. A rank has several blocks if an inner Digit (see Layout) is sharded.
std::vector<Box> owned_boxes(const Layout& layout, std::span<const std::int64_t> sizes,
                             std::span<const std::int64_t> coordinate);

/// Returns the global index of each local position along dimension `tensor_dim`, whose global size
/// is `size`, on the rank at `coordinate`.
std::vector<std::int64_t> global_indices(const Layout& layout, int tensor_dim, std::int64_t size,
                                         std::span<const std::int64_t> coordinate);

/// Returns the index of the first position of chunk `index`, if `size` positions are divided into
/// `chunks` chunks as by torch.chunk.
std::int64_t chunk_offset(std::int64_t size, std::int64_t chunks, std::int64_t index);

/// The elements of a global tensor that one rank stores.
struct FlatPlace {
  std::vector<std::int64_t> sizes;  ///< global sizes of the tensor
  std::vector<Box> boxes;           ///< blocks that the rank stores, in the order of owned_boxes()
  friend bool operator==(const FlatPlace&, const FlatPlace&) = default;
};

/// Returns `place` as a list of integers for an operator's argument (ShardingRule::PlaceArgument):
/// the tensor's global sizes, then the global offset, local offset and sizes of each block (Box).
std::vector<std::int64_t> flat_place(const FlatPlace& place);
/// Converts a list that flat_place() has returned back to a FlatPlace, for a tensor of `ndim`
/// dimensions. Throws Error for a list of the wrong length.
FlatPlace read_flat_place(std::span<const std::int64_t> numbers, std::size_t ndim);

/// The rows of one weight in a fused weight. The fused weight has `groups` equal groups of rows.
/// Each group has `run` rows of this weight.
struct PartRows {
  std::int64_t first = 0;  ///< index of the weight's first row within a group
  std::int64_t run = 0;    ///< number of rows of the weight in each group
  /// Number of rows of a group, including the rows of the other weights.
  std::int64_t group_rows = 0;
  std::int64_t groups = 1;

  /// Finds the weight's rows in the range [first_row, first_row + rows) of the fused weight. For
  /// each group calls visit(row in the weight, offset in the range, number of rows).
  template <class Visit>
  void visit(std::int64_t first_row, std::int64_t rows, const Visit& visit) const {
    for (std::int64_t group = 0; group < groups; ++group) {
      const std::int64_t begin = first + group * group_rows;
      const std::int64_t from = std::max(begin, first_row);
      const std::int64_t to = std::min(begin + run, first_row + rows);
      if (from < to) {
        visit(group * run + from - begin, from - first_row, to - from);
      }
    }
  }
};

}  // namespace tessera
TESSERA_API_END
