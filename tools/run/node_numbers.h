// Nodes without given numbers, as with torchrun's c10d: every launcher has the same command line.
// The one that can listen at the job's endpoint is node 0, and numbers the others as they come.

#pragma once

#include "options.h"
#include "process/file_descriptor.h"

namespace tessera::run {

/// What a launcher learns.
struct NodeNumber {
  int node_rank = 0;
  FileDescriptor listener;  ///< of node 0: the place, for rank 0's store
};

/// Returns once all launchers of the job are there. Throws Error where one of them has another
/// number of nodes or of ranks, and where some have not come within --timeout (TESSERA_TIMEOUT, or
/// 600 s).
NodeNumber agree_on_number(const Options& options);

}  // namespace tessera::run
