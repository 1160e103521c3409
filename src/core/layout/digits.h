// Functions on digits (factors of a tensor dimension, divided over mesh dimensions) that layouts,
// the redistribution planner and propagation share: sizes over a mesh, and the canonical form.
// tessera/core/detail/layout.h defines digits.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/core/detail/layout.h"
#include "tessera/core/detail/rounding.h"

namespace tessera::detail {

/// The size of one mesh dimension. `Sizes` may be any container of sizes.
template <class Sizes>
std::int64_t mesh_size(const Sizes& mesh_sizes, int mesh_dim) {
  return mesh_sizes[static_cast<std::size_t>(mesh_dim)];
}

/// The product of the sizes of `mesh_dims`.
std::int64_t mesh_product(const std::vector<std::int64_t>& mesh_sizes,
                          const std::vector<int>& mesh_dims);

/// The canonical form of `digits` (see Layout). Neighbouring digits that act as one are merged,
/// even if only the sizes show it: [2 over dp][8] is [16 over dp] for dp=2.
std::vector<Digit> canonical_digits(const std::vector<std::int64_t>& mesh_sizes,
                                    std::vector<Digit> digits);

/// `layout` with every mesh dimension of size 1 replicated. Each rank has the same values under
/// both layouts, so the planner need not distinguish them.
LayoutPtr without_unit_mesh_dims(LayoutPtr layout);

/// The digits of each of several factors, the major digit first.
using FactorDigits = std::vector<std::vector<Digit>>;

/// Distributes the digits of one tensor dimension over its factors. A digit that contains a
/// boundary between factors is split there. Returns nullopt if the chunks of the digit do not end
/// at the boundary. All extents must be explicit (not 0), and the factors' sizes must multiply to
/// the product of the extents.
std::optional<FactorDigits> align_digits(std::vector<Digit> digits,
                                         std::span<const std::int64_t> factor_sizes,
                                         std::span<const std::int64_t> mesh_sizes);

/// Removes the innermost mesh dimension from `digits` and returns it; -1 if there is none.
int drop_innermost(std::vector<Digit>& digits);

/// Whether all chunks of `digits` have equal sizes. True for 12 positions over 2 and 3 ranks, false
/// for 10.
bool splits_evenly(std::span<const Digit> digits, std::span<const std::int64_t> mesh_sizes);

/// Whether some rank has no position of `digits`.
bool splits_to_nothing(std::span<const Digit> digits, std::span<const std::int64_t> mesh_sizes);

}  // namespace tessera::detail
