// Arithmetic on lists of ranks, without a world or a mesh: shared by slices and groups.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/core/mesh_shape.h"

namespace tessera {

/// The submesh through `coordinate` over `dims`, of the mesh of `shape` that holds `ranks`: its
/// ranks, row-major in the order of `dims`.
std::vector<int> ranks_through(const std::vector<int>& ranks, const MeshShape& shape,
                               std::vector<std::int64_t> coordinate, const std::vector<int>& dims);

/// The ranks of the product of `parts`, row-major in their order. `parts` are lists of ranks of
/// `root`, each with `own` in it. The product has the ranks that are reached from `own` by one step
/// within each list. Empty if the lists do not form a product: if a step leaves the root, or two
/// lead to one rank.
std::vector<int> product_through(const std::vector<int>& root,
                                 const std::vector<std::vector<int>>& parts, int own);

}  // namespace tessera
