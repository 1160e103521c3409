// Properties of this machine: its identity and network address, and whether a process on this
// machine is still alive.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "tessera/export.h"

namespace tessera::comm {

/// Returns a text with the boot id and the network namespace of this process. Processes with equal
/// texts can reach each other over loopback.
std::string host_identity();

/// Returns this machine's host name, which other machines cannot always resolve.
std::string host_name();

/// Returns the numeric address of this machine for other machines. The address belongs to the
/// interface GLOO_SOCKET_IFNAME or to the interface that routes to `peer`, rank 0's machine. Throws
/// Error if only a loopback address exists.
std::string routable_address(const std::string& peer);

/// Returns the resolver's error message for an unknown host name; "" for a known host name.
std::string why_unknown(const std::string& host);

/// Whether `address` is "localhost" or in 127.0.0.0/8.
bool is_loopback(const std::string& address);

/// Opens a TCP socket that listens on 127.0.0.1:`port`. Throws Error if the port is in use.
int listen_on_loopback(std::uint16_t port);

/// A process on this machine. A later process with the same pid has another start time.
struct ProcessIdentity {
  std::int64_t pid = 0;
  std::uint64_t start_time = 0;  ///< when the process began, in clock ticks since boot
};

ProcessIdentity this_process();
/// Whether a process is alive. A zombie, which has ended but is not reaped, is not alive.
bool is_alive(const ProcessIdentity& process);

}  // namespace tessera::comm

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// A function that returns the value of an environment variable; nullopt if the variable is unset
/// or empty.
using Variables = std::function<std::optional<std::string>(const std::string& name)>;

/// The properties of a job that the launcher sets in environment variables.
struct JobVariables {
  /// The name of the launcher and of its variables, for messages; "" without a launcher.
  std::string launcher;
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank;
  std::string address;  ///< address of rank 0's store; empty for a world of one rank
  std::uint16_t port = 0;
  bool agent_store = false;  ///< whether torchrun's agent, not rank 0, serves the store
  /// The file descriptor of a bound socket for rank 0's store, inherited from the launcher.
  std::optional<int> store_fd;
  std::string key_prefix;  ///< prefix of all keys in the store, different for each job and restart
  std::optional<std::chrono::milliseconds> timeout;
  std::optional<std::chrono::milliseconds> watchdog;
};

/// Reads the environment variables of a launcher: tessera-run, torchrun, Open MPI or Slurm's srun.
/// Without a launcher, the job has one rank. Throws Error for a malformed, missing or contradictory
/// value.
JobVariables read_job_variables(const Variables& variables);
/// Sets the time-outs of `job` from TESSERA_TIMEOUT and TESSERA_WATCHDOG. Called by
/// read_job_variables(). Throws Error for a malformed value.
void read_time_limits(const Variables& variables, JobVariables& job);
/// The value of a variable in this process's environment; nullopt if the variable is unset or
/// empty.
std::optional<std::string> environment_variable(const std::string& name);

/// Call this function after an error that another rank has caused. Under tessera-run, waits half a
/// second, so that the other rank prints its error first.
void wait_for_first_failure();

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
