// Where the launchers of several nodes meet before a job starts: those without given numbers, which
// all have the same command line, as with torchrun's c10d; and all of a job that may start again or
// with fewer nodes. The one that can listen at the job's endpoint is node 0, and numbers the
// others.

#pragma once

#include <vector>

#include "options.h"
#include "process/file_descriptor.h"

namespace tessera::run {

/// Whether the launchers of a job meet. Otherwise each knows its part from the command line.
bool meets(const Options& options);

/// What a launcher learns there.
struct Meeting {
  int nnodes = 1;
  int node_rank = 0;
  int round = 0;                      ///< how many starts of the job node 0 has seen before
  FileDescriptor listener;            ///< of node 0: the place, for rank 0's store
  std::vector<FileDescriptor> peers;  ///< to the other launchers, for as long as the job runs
};

/// Returns once all launchers of the job are there, or Options::last_call after Options::min_nodes
/// of them are. Numbers that the command lines give keep their order. `round`: how often this
/// launcher has started the job before. Throws Error where one of them has another number of nodes
/// or of ranks, where two have the same number, and where some have not come in time.
Meeting meet(const Options& options, int round);

}  // namespace tessera::run
