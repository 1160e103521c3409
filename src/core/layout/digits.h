// Functions on Digits (sub-dimensions of a tensor dimension) that layouts and the redistribution
// planner share: sizes over a mesh, and the canonical form. tessera/core/detail/layout.h defines
// Digit.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/core/detail/layout.h"
#include "tessera/core/detail/rounding.h"

namespace tessera::detail {

template <class Sizes>
std::int64_t mesh_size(const Sizes& mesh_sizes, int mesh_dim) {
  return mesh_sizes[static_cast<std::size_t>(mesh_dim)];
}

std::int64_t mesh_product(const std::vector<std::int64_t>& mesh_sizes,
                          const std::vector<int>& mesh_dims);

/// Returns the canonical form of `digits` (see Layout): neighbouring Digits (sub-dimensions) that
/// shard like a single Digit are merged. For dp=2, [2 over dp][8] becomes [16 over dp].
std::vector<Digit> canonical_digits(const std::vector<std::int64_t>& mesh_sizes,
                                    std::vector<Digit> digits);

/// Throws Error unless `sizes` has one entry for each tensor dimension of `layout`.
void check_ndim(const Layout& layout, std::span<const std::int64_t> sizes);

/// Returns `layout` with every mesh dimension of size 1 replicated. Local tensors do not change, so
/// redistribution plans treat both layouts as equal.
LayoutPtr without_unit_mesh_dims(LayoutPtr layout);

}  // namespace tessera::detail
