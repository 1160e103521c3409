#pragma once

#include <cstdint>
#include <vector>

#include "tessera/core/detail/flight_record.h"

namespace tessera::comm {

/// A thread of a process of this host; `thread` 0: the process's first.
struct WatchedThread {
  std::int64_t pid = 0;
  std::uint64_t start_time = 0;  ///< of the process, see ProcessIdentity
  std::int64_t thread = 0;
};

/// The activity of each thread, from two readings of /proc a quarter of a second apart.
std::vector<flight::Activity> observe_threads(const std::vector<WatchedThread>& threads);

}  // namespace tessera::comm
