// Computes which elements of a global tensor a rank has.
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

// In all functions `sizes` are the global sizes of a tensor, and `coordinate` is a rank's position
// in the mesh, with one index for each mesh dimension. All functions are pure: not collective, and
// thread safe. Functions that take `sizes` throw Error if `sizes` or `coordinate` has the wrong
// length.

/// The sizes of the local tensor of the rank at `coordinate`.
std::vector<std::int64_t> local_sizes(const Layout& layout, std::span<const std::int64_t> sizes,
                                      std::span<const std::int64_t> coordinate);

/// The local size of dimension `tensor_dim`, whose global size is `size`, on the rank at
/// `coordinate`. Does not check its arguments.
std::int64_t local_size(const Layout& layout, int tensor_dim, std::int64_t size,
                        std::span<const std::int64_t> coordinate);

/// The number of elements of the local tensor of the rank at `coordinate`.
std::int64_t local_numel(const Layout& layout, std::span<const std::int64_t> sizes,
                         std::span<const std::int64_t> coordinate);

/// A block of the global tensor that is stored on one rank: a range of indices in every dimension.
struct Box {
  std::vector<std::int64_t> global_offset;  ///< first index of each dimension in the global tensor
  /// First index of each dimension in the local tensor of the rank.
  std::vector<std::int64_t> local_offset;
  std::vector<std::int64_t> sizes;
  friend bool operator==(const Box&, const Box&) = default;
};

/// The blocks of the global tensor that the rank at `coordinate` stores, in row-major order,
/// without empty blocks. There is one block, unless a dimension has a local digit before a sharded
/// digit.
std::vector<Box> owned_boxes(const Layout& layout, std::span<const std::int64_t> sizes,
                             std::span<const std::int64_t> coordinate);

/// The global index of each local position along dimension `tensor_dim`, whose global size is
/// `size`, on the rank at `coordinate`.
std::vector<std::int64_t> global_indices(const Layout& layout, int tensor_dim, std::int64_t size,
                                         std::span<const std::int64_t> coordinate);

/// The index of the first position of chunk `index`, if `size` positions are divided into `chunks`
/// chunks as chunk_size() does (placement.h).
std::int64_t chunk_offset(std::int64_t size, std::int64_t chunks, std::int64_t index);

/// The elements of a global tensor that one rank stores.
struct FlatPlace {
  std::vector<std::int64_t> sizes;  ///< global sizes of the tensor
  std::vector<Box> boxes;           ///< blocks that the rank stores, in the order of owned_boxes()
  friend bool operator==(const FlatPlace&, const FlatPlace&) = default;
};

/// `place` as a list of integers for an operator's argument (ShardingRule::PlaceArgument): the
/// sizes, then the global offset, the local offset and the sizes of each box. Pure.
std::vector<std::int64_t> flat_place(const FlatPlace& place);
/// The inverse of flat_place, for a tensor of `ndim` dimensions. Throws Error for a list of the
/// wrong length.
FlatPlace read_flat_place(std::span<const std::int64_t> numbers, std::size_t ndim);

/// The rows of one part of a fused weight, which stores several weights in one tensor. The fused
/// weight consists of equal groups of rows. The part consists of one range of rows in each group;
/// here such a range is called a run.
struct PartRows {
  std::int64_t first = 0;  ///< first row of the part's run in the first group
  std::int64_t run = 0;    ///< number of rows of each run
  /// Number of rows from the beginning of one run to the beginning of the next run.
  std::int64_t group_rows = 0;
  std::int64_t groups = 1;

  /// Calls visit(row, from, count) for each run of this part that overlaps with a block of the
  /// fused weight, which has the rows [first_row, first_row + rows). The overlap has `count` rows.
  /// It begins at row `row` of the part and at row `from` of the block.
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
