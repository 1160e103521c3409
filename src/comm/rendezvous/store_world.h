// The World of a job after the rendezvous. Processes share a TCP store, threads a store in memory.

#pragma once

#include <string>
#include <vector>

#include "rendezvous/group_setup.h"
#include "tessera/comm/world.h"
#include "watch/world_watch.h"

namespace tessera::comm {

/// Throws Error for an unknown device or back end, or a combination that is not supported.
void check_options(const WorldOptions& options);

/// The number of the next world of this process, which names its flight records. Ranks that make
/// the same worlds in the same order get the same numbers.
int next_world_number();
WatchSettings watch_settings(int rank, int world, const WorldOptions& options);

/// The world of ranks that share a store. With device "cuda" the calling thread's current device
/// becomes the local rank's device.
WorldPtr make_store_world(JobInfo job, const WorldOptions& options);

/// Like thread_worlds(), with the given host names. The ranks share a store in memory.
TESSERA_API_FOR_TEST_BEGIN
std::vector<WorldPtr> thread_worlds_on(const std::vector<std::string>& hosts,
                                       const WorldOptions& options);
TESSERA_API_FOR_TEST_END

}  // namespace tessera::comm
