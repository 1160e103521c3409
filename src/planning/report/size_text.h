#pragma once

#include <cstdint>
#include <string>

#include "tessera/observe/text.h"

namespace tessera::planning {

/// "61.2 GiB".
inline std::string size_text(std::int64_t bytes) {
  return observe::bytes_text(static_cast<double>(bytes));
}

}  // namespace tessera::planning
