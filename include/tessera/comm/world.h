#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/trace.h"

namespace tessera::comm {

struct WorldOptions {
  std::string device = "cpu";    ///< "cpu" or "cuda"
  std::string backend = "gloo";  ///< "gloo" or "nccl"; gloo uses shared memory within one host
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

/// The ranks of a job, seen from one of them: who they are and how groups of them are made. There
/// is no process-wide rank: everything hangs off a World, so one process can hold several ranks.
class World {
 public:
  virtual ~World() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int local_rank() const = 0;
  virtual const WorldOptions& options() const = 0;
  /// All collectives of this rank are counted here.
  virtual TrafficCounter& traffic() = 0;
  /// The group of `ranks` (world ranks, in group order), called `name` in traces. Collective over
  /// exactly those ranks; made once per (ranks, name). A group of one communicates with nobody.
  virtual CommunicatorPtr group(const std::vector<int>& ranks, const std::string& name) = 0;
  /// Makes peers that wait for this rank fail soon. Called when a rank ends with an exception.
  virtual void abort() {}
};
using WorldPtr = std::shared_ptr<World>;

/// From RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (tessera-run, torchrun), or
/// Slurm's or Open MPI's variables; without any of them a world of one. Collective. From then on
/// the process ignores SIGPIPE, unless it handles it. Throws Error where the variables contradict
/// each other, the port is in use or a peer does not come within the time-out.
WorldPtr world_from_environment(const WorldOptions& options = {});

/// Worlds of `size` ranks in this process, one for each thread. `worlds[r]` is rank r's.
std::vector<WorldPtr> thread_worlds(int size, const WorldOptions& options = {});

/// Rank `rank` of a job of `size` that exists only on paper: collectives return at once with
/// results of the right shape (this rank's own data in every place). For planning and counting.
WorldPtr fake_world(int rank, int size);

}  // namespace tessera::comm
