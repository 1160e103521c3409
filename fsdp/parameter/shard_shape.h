#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/core/detail/rounding.h"
#include "tessera/core/layout_math.h"

namespace tessera::fsdp {

/// How a tensor of `sizes` is split on `dim` over `ranks`: as torch.chunk does, so trailing ranks
/// may hold less or nothing. Without a dimension each rank has all of it. In flat buffers every
/// rank's shard takes as much room as rank 0's.
///
/// A fused weight has `parts`, one after another, and each is split so: a rank has its rows of the
/// first part, then those of the second.
struct ShardShape {
  std::vector<std::int64_t> sizes;
  // Where `dim` is empty, rows() is 1 and row_numel() all elements, so that the arithmetic of flat
  // buffers needs no case for it.
  std::optional<std::int64_t> dim = 0;
  std::int64_t ranks = 1;
  std::int64_t parts = 1;  ///< equal ones

  /// Whether the ranks' shards one after another are the tensor.
  bool splits_rows() const { return dim == std::int64_t{0} && parts == 1; }
  /// Rows of a part on rank 0, and on `rank`; 1 without a dimension.
  std::int64_t chunk() const { return dim ? detail::ceil_div(extent(), ranks) : 1; }
  std::int64_t rows(std::int64_t rank) const;
  /// Where the rows of `rank` begin in each part.
  std::int64_t first_row(std::int64_t rank) const;
  std::vector<std::int64_t> shard_sizes(std::int64_t rank) const;
  /// Elements of a shard, and of the room that each rank's shard takes.
  std::int64_t numel(std::int64_t rank) const { return rows(rank) * row_numel(); }
  std::int64_t padded_numel() const { return chunk() * row_numel(); }

  // Views with `dim` as two dimensions, (parts, rows): of the rows that `rank` has in `unsharded`,
  // and of its `shard`. Equal sizes.
  at::Tensor rows_of(const at::Tensor& unsharded, std::int64_t rank) const {
    return by_parts(unsharded).narrow(*dim + 1, first_row(rank), rows(rank));
  }
  at::Tensor by_parts(const at::Tensor& tensor) const {
    return tensor.unflatten(*dim, {parts, tensor.size(*dim) / parts});
  }

 private:
  std::int64_t extent() const { return sizes[static_cast<std::size_t>(*dim)] / parts; }
  std::int64_t row_numel() const;
};

inline std::int64_t ShardShape::rows(std::int64_t rank) const {
  return dim ? chunk_size(extent(), ranks, rank) : 1;
}

inline std::int64_t ShardShape::first_row(std::int64_t rank) const {
  return dim ? chunk_offset(extent(), ranks, rank) : 0;
}

inline std::vector<std::int64_t> ShardShape::shard_sizes(std::int64_t rank) const {
  std::vector<std::int64_t> shard = sizes;
  if (dim) {
    shard[static_cast<std::size_t>(*dim)] = parts * rows(rank);
  }
  return shard;
}

/// Elements of one row of every part; all of the tensor's without a dimension.
inline std::int64_t ShardShape::row_numel() const {
  std::int64_t numel = parts;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    numel *= dim && i == static_cast<std::size_t>(*dim) ? 1 : sizes[i];
  }
  return numel;
}

}  // namespace tessera::fsdp
