#pragma once

#include <fmt/format.h>

#include <string>

namespace tessera::planning {

/// "14.982 s", and where that says little "1.802 ms".
inline std::string seconds_text(double seconds) {
  return seconds < 0.01 && seconds > 0 ? fmt::format("{:.3f} ms", 1e3 * seconds)
                                       : fmt::format("{:.3f} s", seconds);
}

}  // namespace tessera::planning
