#pragma once

#include <cstdint>
#include <string>

#include "tessera/observe/text.h"

namespace llama {

/// "61.2 GiB".
inline std::string size_text(std::int64_t bytes) {
  return tessera::observe::bytes_text(static_cast<double>(bytes));
}

}  // namespace llama
