#pragma once

#include <cstdint>
#include <vector>

#include "tessera/core/mesh_shape.h"

namespace tessera {

/// Of the mesh of `shape` that holds `ranks`: those that differ from `coordinate` in `dims` only,
/// row-major in the order of `dims`.
std::vector<int> ranks_through(const std::vector<int>& ranks, const MeshShape& shape,
                               std::vector<std::int64_t> coordinate, const std::vector<int>& dims);

/// The ranks of the product of `parts`, lists of ranks of `root` that all hold `own`: what is
/// reached from `own` by a step within each of them, row-major in their order. Empty if that is no
/// product: a step leaves the root, or two lead to one rank.
std::vector<int> product_through(const std::vector<int>& root,
                                 const std::vector<std::vector<int>>& parts, int own);

}  // namespace tessera
