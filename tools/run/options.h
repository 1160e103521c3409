#pragma once

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

  int world_size() const { return nproc * nnodes; }
  int first_rank() const { return nproc * node_rank; }
};

/// Nothing where --help was asked for (and printed). Throws Error on a bad command line.
std::optional<Options> parse_options(int argc, const char* const* argv);

}  // namespace tessera::run
