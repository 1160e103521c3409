// The World of ranks that share a c10d store: a TCP store for processes, a store in memory for
// threads.

#pragma once

#include <string>
#include <vector>

#include "rendezvous/group_setup.h"
#include "tessera/comm/world.h"
#include "watch/watch.h"

namespace tessera::comm {

/// Throws Error for an unknown device or back end, or a combination that is not supported.
void check_options(const WorldOptions& options);

/// Returns the GroupInfo of the process group of `ranks`. Throws Error if a rank is not in the
/// world, or if this rank is not in `ranks`.
GroupInfo info_of_group(const World& world, const std::vector<int>& ranks, const std::string& name);

/// Returns how many Worlds this process has made before. The number is part of the name of a flight
/// record. Ranks must make equal Worlds in equal order.
int next_world_number();
WatchSettings watch_settings(int rank, int world, const WorldOptions& options);

/// Makes a World of ranks that share a c10d store. With device "cuda", makes the GPU of the local
/// rank the current GPU of the calling thread.
WorldPtr make_store_world(JobInfo job, const WorldOptions& options);

/// Like thread_worlds(), but as if rank r were on a machine named hosts[r].
TESSERA_API_FOR_TEST_BEGIN
std::vector<WorldPtr> thread_worlds_on(const std::vector<std::string>& hosts,
                                       const WorldOptions& options);
TESSERA_API_FOR_TEST_END

}  // namespace tessera::comm
