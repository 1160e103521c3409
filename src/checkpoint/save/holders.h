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

/// Who holds what of a tensor; a plain one is whole on all `world_size` ranks. From the layout
/// alone: the same on every rank of the world. The other slices of a mesh that was sliced hold
/// copies. Throws Error for a mesh of which the ranks of other slices can't be known.
std::vector<Holders> holders_of(const at::Tensor& tensor, int world_size);

}  // namespace tessera::checkpoint
