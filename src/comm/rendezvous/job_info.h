#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/internals/detail/c10d.h"
#include "watch/world_watch.h"

namespace tessera::comm {

/// A rank's view of its job after the rendezvous.
struct JobInfo {
  detail::StorePtr store;  ///< shared by this job's ranks alone
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  /// For each rank, the identity of its host. Where two are equal, loopback and shared memory work.
  std::vector<std::string> hosts;
  /// This host's address for ranks on other hosts; may be empty if there are none.
  std::string address;
  /// The ranks' watch of one another; nullptr in a world of one.
  WorldWatchPtr watch;
};
using JobPtr = std::shared_ptr<const JobInfo>;

}  // namespace tessera::comm
