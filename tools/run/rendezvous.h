// Where the ranks of the job meet, and the environment variables that tell them. The other side,
// which reads these variables in a rank, is src/comm/host/job_variables.h.

#pragma once

#include <netdb.h>

#include <memory>
#include <string>
#include <vector>

#include "options.h"
#include "process/file_descriptor.h"

namespace tessera::run {

/// getaddrinfo()'s list, which frees itself.
using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// The addresses of the host and port where the ranks meet. Throws Error for an unknown host.
AddressList find_addresses(const Options& options);

/// What a name service says of a host that it does not know yet; "" of one that it knows.
std::string why_unknown(const std::string& host);

/// A socket that listens there; empty, with errno, where the host is another machine or the port is
/// in use. Throws Error for an unknown host.
FileDescriptor try_listen(const Options& options);

/// Throws Error for what errno says of try_listen() on node 0.
[[noreturn]] void fail_to_listen(const Options& options);

/// Where the ranks of the job meet.
struct Rendezvous {
  std::string host;
  int port = 0;
  FileDescriptor listener;  ///< bound and listening, for rank 0; on node 0 only
};

/// On node 0, waits up to a minute (or --timeout) until its own host name is known: under
/// Kubernetes a pod may start before its name can be looked up. Not for addresses.
void wait_for_host(const Options& options);

/// On node 0, binds the socket of rank 0's store. So no other process can take the port before the
/// store starts, and ranks that come early wait in its queue. A job of one node listens on loopback
/// only. `listener`: such a socket that is there already, or empty. Throws Error if the port is in
/// use or the host is not this machine's.
Rendezvous make_rendezvous(const Options& options, FileDescriptor listener);

/// A random word that the ranks of a job share, so that they can refuse connections from outside of
/// it. TESSERA_JOB_TOKEN if it is set; for several nodes --rdzv-id, which may be empty: they have
/// no other common source for it. Where launchers meet, starts after the first add their number.
std::string job_token(const Options& options);

/// The environment of a rank, as "NAME=value": this process's own with the job's variables set.
/// Rank 0 also gets the number of its store's listening descriptor.
std::vector<std::string> rank_environment(const Options& options, const Rendezvous& rendezvous,
                                          const std::string& token, const std::string& run_dir,
                                          int local_rank);

}  // namespace tessera::run
