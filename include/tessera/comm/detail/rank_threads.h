#pragma once

#include <cstddef>
#include <numeric>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// All ranks of a world of `size` ranks, in order.
inline std::vector<int> ranks_of_world(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// Shows this thread's warnings in the form of the rank's main thread: one line, each text once for
/// the whole job. libtorch's warning handler is per thread, so each thread of the library that may
/// warn calls this first. Does nothing before world_from_environment(), or if the thread has its
/// own handler.
void take_warnings_of_thread();

}  // namespace tessera::comm
TESSERA_API_END
