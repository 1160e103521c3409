#pragma once

#include <cstdint>

#include "watch/world_watch.h"

namespace tessera::comm {

/// Lists the calling thread in the record of this rank until the thread ends, and notes that it
/// works on nothing but its calls from now on. Returns the system's number of it.
std::int64_t list_this_thread(const WorldWatchPtr& world);

}  // namespace tessera::comm
