// The launcher's command line, apart from what it does.

#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "command_line/streams.h"

namespace tessera::run {

/// Where the ranks' outputs go, beside or instead of the launcher's own.
struct LogOptions {
  std::string folder;  ///< "": a temporary one, where there are outputs to write
  Streams redirects;   ///< to files alone
  Streams tee;         ///< to files too
  std::int64_t file_bytes = std::int64_t{256} << 20;  ///< of a file, then the next begins; 0: all
  std::set<int> shown;  ///< local ranks whose output the launcher shows; empty: all
};

/// What the command line asks for.
struct Options {
  int nproc = 1;                 ///< ranks on this node
  int nnodes = 1;                ///< at most
  int min_nodes = 1;             ///< what the job may begin with once last_call is over
  bool place_is_shared = false;  ///< several nodes were asked for, whatever nnodes becomes
  int node_rank = 0;
  bool is_numbered = true;           ///< false: the launchers agree on node_rank
  std::string host = "127.0.0.1";    ///< where rank 0's store listens
  int port = 0;                      ///< 0: chosen by the system
  std::string job_id;                ///< of torchrun's --rdzv-id; "": none
  std::vector<std::string> program;  ///< and its arguments
  /// The ranks' timeouts, in seconds; empty where the environment or the program decides.
  std::string timeout;
  std::string watchdog;
  std::string run_dir;  ///< "": a temporary one
  LogOptions logs;
  /// What the ranks have to end by themselves after a signal to the launcher.
  std::chrono::duration<double> grace{5};
  int restarts = 0;  ///< how often the job is started again after a failure
  int round = 0;     ///< how often it was, on several nodes
  /// How long launchers wait for one another, and how long for more than min_nodes.
  std::chrono::duration<double> join_timeout{600}, last_call{30};
  /// Read the records in this folder instead of running anything; "": run.
  std::string explain;

  int world_size() const { return nproc * nnodes; }
  int first_rank() const { return nproc * node_rank; }
};

/// From the command line, and from torchrun's variables PET_... where it says nothing. Nothing
/// where --help was asked for (and printed). Throws Error on a bad command line.
std::optional<Options> parse_options(int argc, const char* const* argv);

}  // namespace tessera::run
