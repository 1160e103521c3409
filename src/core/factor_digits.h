#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/core/layout.h"

namespace tessera {

/// The digits of each of several factors, major first.
using FactorDigits = std::vector<std::vector<Digit>>;

/// Distributes the digits of one tensor dimension over the factors that it consists of. A digit
/// that spans a factor boundary is cut there, if its splits line up with the boundary. nullopt
/// where they don't. All extents are explicit; the factors' sizes multiply to that of the digits.
std::optional<FactorDigits> align_digits(std::vector<Digit> digits,
                                         std::span<const std::int64_t> factor_sizes,
                                         std::span<const std::int64_t> mesh_sizes);

/// Removes from `digits` the mesh dimension that is applied last, the innermost of the last split
/// digit. Returns it, or -1 if nothing is split.
int drop_innermost(std::vector<Digit>& digits);

/// Whether every split of `digits` gives equal parts.
bool splits_evenly(std::span<const Digit> digits, std::span<const std::int64_t> mesh_sizes);

/// Whether some split of `digits` gives a part without positions.
bool splits_to_nothing(std::span<const Digit> digits, std::span<const std::int64_t> mesh_sizes);

}  // namespace tessera
