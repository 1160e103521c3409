#pragma once

#include <cstdint>

namespace tessera::planning {

/// More than a plan can be made for: groups have lists of their ranks.
inline constexpr std::int64_t kMostRanks = 1 << 24;

}  // namespace tessera::planning
