// This host as its peers see it: which ranks share it, at which address others reach it, and
// whether a process on it is still alive.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "tessera/export.h"

namespace tessera::comm {

/// Equal for two processes that reach each other over loopback: boot id and network namespace.
std::string host_identity();

/// The numeric address by which other hosts reach this one: of the interface GLOO_SOCKET_IFNAME, or
/// of the one that routes to `peer`. Throws Error if there is none but loopback.
std::string routable_address(const std::string& peer);

/// What a name service says of a host that it does not know; "" of one that it knows.
std::string why_unknown(const std::string& host);

/// True for "localhost" and 127.0.0.0/8.
bool is_loopback(const std::string& address);

/// A TCP socket bound to 127.0.0.1:`port`, listening. Throws Error if the port is in use.
int listen_on_loopback(std::uint16_t port);

/// A process of this host. The start time distinguishes it from a later one with the same pid.
struct ProcessIdentity {
  std::int64_t pid = 0;
  std::uint64_t start_time = 0;  ///< in clock ticks since boot
};

ProcessIdentity this_process();
/// False once the process has ended, also while it waits to be reaped.
bool is_alive(const ProcessIdentity& process);

/// The kernel's status of a thread.
struct ThreadStatus {
  char state = 'X';             ///< as in /proc: R, S, D, T, ...
  std::uint64_t cpu_ticks = 0;  ///< computed so far
};

/// nullopt if there is no such thread.
std::optional<ThreadStatus> thread_status(std::int64_t pid, std::int64_t thread);

}  // namespace tessera::comm

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// The value of an environment variable, or nullopt. An empty value counts as unset.
using Variables = std::function<std::optional<std::string>(const std::string& name)>;

/// The job as the launcher's environment variables describe it.
struct JobVariables {
  std::string launcher;  ///< the launcher and its variables, for messages; "": none
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank;
  int local_size = 0;   ///< ranks of each node; 0: not known
  std::string address;  ///< of rank 0's store; empty for a world of one
  std::uint16_t port = 0;
  bool agent_store = false;     ///< torchrun's agent serves the store, rank 0 doesn't
  std::optional<int> store_fd;  ///< a bound socket for rank 0's store, inherited from the launcher
  std::string key_prefix;       ///< differs between jobs and between restarts of one job
  std::optional<std::chrono::milliseconds> timeout;
  std::optional<std::chrono::milliseconds> watchdog;
};

/// Reads RANK, WORLD_SIZE, … (tessera-run, torchrun), else OMPI_COMM_WORLD_*, else those of a step
/// of srun; none: a world of one. Throws Error for a malformed, missing or contradictory value.
JobVariables read_job_variables(const Variables& variables);
/// From this process's environment.
std::optional<std::string> environment_variable(const std::string& name);

/// For a failure that another rank caused. Under tessera-run it waits for half a second: meanwhile
/// the rank that failed first prints its error, and the launcher ends this rank.
void wait_for_first_failure();

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
