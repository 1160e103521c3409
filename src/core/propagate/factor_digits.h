#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/core/layout.h"

namespace tessera {

/// The digits of each of several factors, major first.
using FactorDigits = std::vector<std::vector<Digit>>;

/// Distributes the digits of one tensor dimension over its factors. A digit that spans a boundary
/// of factors is divided there. nullopt where its chunks do not end at the boundary. All extents
/// are explicit (not 0), and the factors' sizes multiply to the product of the extents.
std::optional<FactorDigits> align_digits(std::vector<Digit> digits,
                                         std::span<const std::int64_t> factor_sizes,
                                         std::span<const std::int64_t> mesh_sizes);

/// Removes the innermost mesh dimension from `digits` and returns it; -1 if there is none.
int drop_innermost(std::vector<Digit>& digits);

/// Whether all chunks of `digits` have equal sizes.
bool splits_evenly(std::span<const Digit> digits, std::span<const std::int64_t> mesh_sizes);

/// Whether some coordinate holds no position of `digits`.
bool splits_to_nothing(std::span<const Digit> digits, std::span<const std::int64_t> mesh_sizes);

}  // namespace tessera
