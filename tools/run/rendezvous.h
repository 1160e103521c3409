#pragma once

#include <string>

#include "file_descriptor.h"
#include "options.h"

namespace tessera::run {

/// Where the ranks of the job meet.
struct Rendezvous {
  std::string host;
  int port = 0;
  FileDescriptor listener;  ///< bound and listening, for rank 0; on node 0 only
};

/// On node 0 binds the socket of rank 0's store: nobody can take the port between its choice and
/// the store's start, and ranks that come early wait in its queue. A job of one node listens on
/// loopback alone. Throws Error where the port is in use or the host is not this machine's.
Rendezvous make_rendezvous(const Options& options);

}  // namespace tessera::run
