#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "shard_shape.h"

namespace tessera::fsdp {

/// Where a parameter's shard lies in a flat buffer of shards.
struct Segment {
  ShardShape shape;
  std::int64_t offset = 0;  ///< in elements
};

/// Elements of a flat buffer that holds these segments one after another.
std::int64_t flat_numel(const std::vector<Segment>& segments);

/// Rank `rank`'s shard in a flat buffer of its shards.
at::Tensor shard_of(const at::Tensor& flat, const Segment& segment, std::int64_t rank);

/// Puts the shards of all ranks together: `gathered` (ranks, flat numel) -> `whole`, a contiguous
/// tensor of segment.shape.sizes for each segment. Types may differ.
void unpack(const at::Tensor& gathered, const std::vector<Segment>& segments,
            const std::vector<at::Tensor>& whole);

/// The inverse, into `buffer` (ranks, flat numel), casting to its type. Padding, and segments whose
/// tensor is undefined, become zeros. `whole` may have any strides.
void pack(const std::vector<at::Tensor>& whole, const std::vector<Segment>& segments,
          const at::Tensor& buffer);

}  // namespace tessera::fsdp
