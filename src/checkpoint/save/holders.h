#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::checkpoint {

/// The ranks that hold the same part of a tensor, and the coordinate of that part on the tensor's
/// mesh.
struct Holders {
  std::vector<std::int64_t> coordinate;  ///< empty for a plain tensor
  std::vector<int> ranks;                ///< of the world, rising
};

/// The ranks that hold each part of a tensor; a plain one is whole on all `world_size` ranks.
/// Computed from the layout alone: the same on every rank of the world. The other slices of a
/// sliced mesh hold copies. Throws Error for a mesh whose other slices have unknown ranks.
std::vector<Holders> holders_of(const at::Tensor& tensor, int world_size);

}  // namespace tessera::checkpoint
