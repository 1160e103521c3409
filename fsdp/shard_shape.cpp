#include "shard_shape.h"

#include "tessera/core/layout_math.h"

namespace tessera::fsdp {

std::int64_t ShardShape::rows(std::int64_t rank) const {
  return dim ? chunk_size(extent(), ranks, rank) : 1;
}

std::int64_t ShardShape::first_row(std::int64_t rank) const {
  return dim ? chunk_offset(extent(), ranks, rank) : 0;
}

std::vector<std::int64_t> ShardShape::shard_sizes(std::int64_t rank) const {
  std::vector<std::int64_t> shard = sizes;
  if (dim) {
    shard[static_cast<std::size_t>(*dim)] = rows(rank);
  }
  return shard;
}

std::int64_t ShardShape::row_numel() const {
  std::int64_t numel = 1;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    numel *= dim && i == static_cast<std::size_t>(*dim) ? 1 : sizes[i];
  }
  return numel;
}

}  // namespace tessera::fsdp
