// The World of a job after the rendezvous. Ranks that are processes share a TCP store, ranks that
// are threads a store in memory.

#pragma once

#include <string>
#include <vector>

#include "rendezvous/group_setup.h"
#include "tessera/comm/world.h"
#include "watch/world_watch.h"

namespace tessera::comm {

/// Throws Error for an unknown device or back end, or a combination that is not supported.
void check_options(const WorldOptions& options);

/// The number of the next world of this process, which names the flight records of the world. Ranks
/// that make the same worlds in the same order get the same numbers.
int next_world_number();
WatchSettings watch_settings(int rank, int world, const WorldOptions& options);

/// The world of ranks that share a store. With device "cuda" the GPU of the local rank becomes the
/// current GPU of the calling thread.
WorldPtr make_store_world(JobInfo job, const WorldOptions& options);

/// The worlds of ranks that are threads, like thread_worlds(), with the given host names. The ranks
/// share a store in memory.
TESSERA_API_FOR_TEST_BEGIN
std::vector<WorldPtr> thread_worlds_on(const std::vector<std::string>& hosts,
                                       const WorldOptions& options);
TESSERA_API_FOR_TEST_END

}  // namespace tessera::comm
