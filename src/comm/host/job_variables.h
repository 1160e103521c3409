#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "tessera/export.h"

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
  std::string key_prefix;       ///< keeps jobs, and restarts of one job, apart
  std::optional<std::chrono::milliseconds> timeout;
  std::optional<std::chrono::milliseconds> watchdog;
};

/// Reads RANK, WORLD_SIZE, … (tessera-run, torchrun), else OMPI_COMM_WORLD_*, else those of a step
/// of srun; none: a world of one. Throws Error for a malformed, missing or contradictory value.
JobVariables read_job_variables(const Variables& variables);
/// From this process's environment.
std::optional<std::string> environment_variable(const std::string& name);

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
