#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera::fsdp {

/// How a tensor of `sizes` is split on `dim` over `ranks`: as torch.chunk does, so trailing ranks
/// may hold less or nothing. Without a dimension each rank has all of it. In flat buffers every
/// rank's shard takes as much room as rank 0's.
struct ShardShape {
  std::vector<std::int64_t> sizes;
  std::optional<std::int64_t> dim = 0;
  std::int64_t ranks = 1;

  /// Extent of `dim` on rank 0, and on `rank`; 1 without a dimension.
  std::int64_t chunk() const { return dim ? (extent() + ranks - 1) / ranks : 1; }
  std::int64_t rows(std::int64_t rank) const;
  /// Where the rows of `rank` begin.
  std::int64_t first_row(std::int64_t rank) const;
  std::vector<std::int64_t> shard_sizes(std::int64_t rank) const;
  /// Elements of a shard, and of the room that each rank's shard takes.
  std::int64_t numel(std::int64_t rank) const { return rows(rank) * row_numel(); }
  std::int64_t padded_numel() const { return chunk() * row_numel(); }

 private:
  std::int64_t extent() const { return sizes[static_cast<std::size_t>(*dim)]; }
  std::int64_t row_numel() const;
};

}  // namespace tessera::fsdp
