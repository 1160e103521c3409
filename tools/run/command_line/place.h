// Where the ranks of a job meet, in tessera-run's words and in torchrun's.

#pragma once

#include <optional>
#include <string>

namespace CLI {
class App;
}  // namespace CLI

namespace tessera::run {

/// This node's part in the job.
struct Place {
  int nnodes = 1;     ///< at most
  int min_nodes = 1;  ///< at least
  std::optional<int> node_rank =
      0;  ///< nullopt: the launchers agree on it, as with torchrun's c10d
  std::string host = "127.0.0.1";
  int port = 0;  ///< 0: chosen by the system
};

void declare_place(CLI::App& app);

/// As torchrun does: --standalone wins over an endpoint, that over --master-addr and --master-port.
/// Throws Error for options that contradict each other.
Place read_place(const CLI::App& app);

}  // namespace tessera::run
