#pragma once

#include <cstdint>

namespace tessera::data {

/// The value of a target that the loss ignores: cross_entropy's ignore_index.
inline constexpr std::int64_t kIgnoredTarget = -100;

}  // namespace tessera::data
