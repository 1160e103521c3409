#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

#include "tessera/comm/world.h"

namespace tessera::comm {

/// What a rank knows of its job after the rendezvous.
struct JobInfo {
  c10::intrusive_ptr<c10d::Store> store;  ///< shared by all ranks, this job's alone
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  /// For each rank, what tells its host from others; equal: loopback and shared memory reach it.
  std::vector<std::string> hosts;
  /// This host's address for ranks on other hosts; may be empty if there are none.
  std::string address;
};

/// Throws Error for an unknown device or backend, or a combination that does not exist.
void check_options(const WorldOptions& options);

/// The world of ranks that meet in a store. With device "cuda" the calling thread's current device
/// becomes that of the local rank.
WorldPtr make_store_world(JobInfo job, const WorldOptions& options);

}  // namespace tessera::comm
