// The launcher's command line, apart from what it does.

#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace tessera::run {

/// What the command line asks for.
struct Options {
  int nproc = 0;  ///< ranks on this node
  int nnodes = 1;
  int node_rank = 0;
  std::string host = "127.0.0.1";    ///< where rank 0's store listens
  int port = 0;                      ///< 0: chosen by the system
  std::vector<std::string> program;  ///< and its arguments
  /// Of the ranks, in seconds; empty where the environment or the program decides.
  std::string timeout;
  std::string watchdog;
  std::string run_dir;  ///< "": a temporary one
  /// What the ranks have to end by themselves after a signal to the launcher.
  std::chrono::duration<double> grace{5};
  int restarts = 0;  ///< how often the job is started again after a failure
  /// Read the records in this folder instead of running anything; "": run.
  std::string explain;

  int world_size() const { return nproc * nnodes; }
  int first_rank() const { return nproc * node_rank; }
};

/// Nothing where --help was asked for (and printed). Throws Error on a bad command line.
std::optional<Options> parse_options(int argc, const char* const* argv);

}  // namespace tessera::run
