#pragma once

#include <cstddef>
#include <numeric>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// All ranks of a world of this size, in order.
inline std::vector<int> ranks_of_world(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace tessera::comm
TESSERA_API_END
