#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/trace.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// Where a world's ranks compute, how they communicate, and how long they wait for one another.
struct WorldOptions {
  std::string device = "cpu";    ///< "cpu" or "cuda"
  std::string backend = "gloo";  ///< "gloo" or "nccl"; gloo uses shared memory within hosts
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// A wait that lasts longer is reported on stderr, with what all ranks do; 0: none is.
  std::chrono::milliseconds watchdog = std::chrono::seconds(30);
};

/// The ranks of a job, seen from one of them. There is no process-wide rank: all communication
/// starts from a World, so that one process can hold several ranks. Thread safe; its communicators
/// are not.
class World {
 public:
  virtual ~World() = default;
  virtual int rank() const = 0;  ///< from 0
  virtual int size() const = 0;
  virtual int local_rank() const = 0;  ///< among the ranks of this host, from 0
  virtual const WorldOptions& options() const = 0;
  /// All collectives of this rank are counted here.
  virtual TrafficCounter& traffic() = 0;
  /// The group of `ranks` (world ranks, in group order), called `name` in messages and traces.
  /// Collective over exactly those ranks at the first call; later calls with the same ranks and
  /// name return the same group. A group of one does not communicate. Throws Error for ranks that
  /// are not in the world or do not include this one, and PeerError.
  virtual CommunicatorPtr group(const std::vector<int>& ranks, const std::string& name) = 0;
  /// Says that a step of the program has ended, for messages: "rank 1 ended after step 20".
  virtual void set_step([[maybe_unused]] std::int64_t step) {}
  /// Makes peers that wait for this rank fail soon, instead of at the time-out. To be called when a
  /// rank ends with an exception.
  virtual void abort() {}
  /// The index of this rank's GPU; -1 with device "cpu". A thread that the program starts is on GPU
  /// 0 until it sets another one; the library allocates on this rank's GPU on every thread.
  virtual int device_index() const { return -1; }
  /// Ends the world on this rank, when its work is done: groups end in the opposite order of their
  /// making, NCCL's with all their ranks. Meshes, tensors and works may outlive it; a collective of
  /// theirs, and group(), then throw Error. Does nothing the second time, or after abort(). Throws
  /// PeerError if a rank of a group of NCCL's does not come; the world has ended even so.
  virtual void shutdown() {}
  /// As group(), between the hosts: for tensors on the CPU, whatever the device. Its traffic is not
  /// counted. It is a separate group from those that group() returns, so that one thread may use it
  /// while another uses those. This default is for worlds whose groups are on the CPU.
  virtual CommunicatorPtr host_group(const std::vector<int>& ranks, const std::string& name) {
    return group(ranks, name);
  }
};
/// Shared by the meshes on the world.
using WorldPtr = std::shared_ptr<World>;

/// Ends a world with a scope: by shutdown(), or by abort() where an exception leaves the scope. An
/// NCCL world that was made on the main thread and is not ended so is ended when main() returns,
/// but then waits only briefly for its peers.
class WorldScope {
 public:
  explicit WorldScope(WorldPtr world)
      : world_(std::move(world)), exceptions_(std::uncaught_exceptions()) {}
  WorldScope(const WorldScope&) = delete;
  WorldScope& operator=(const WorldScope&) = delete;
  /// What shutdown() or abort() throws is a warning.
  ~WorldScope();

  const WorldPtr& world() const { return world_; }

 private:
  WorldPtr world_;
  int exceptions_;  ///< that were under way when the scope began
};

/// The world that the launcher describes: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
/// (tessera-run, torchrun), or the variables of Slurm or Open MPI; a world of one without any of
/// them. Collective. From then on the process ignores SIGPIPE unless it has a handler, so that a
/// peer's death is an error instead of the end of this process. Throws Error if variables
/// contradict each other, the port is in use, or a peer does not come within the time-out.
WorldPtr world_from_environment(const WorldOptions& options = {});

/// The worlds of `size` ranks in this process; element r is for the thread that is rank r.
std::vector<WorldPtr> thread_worlds(int size, const WorldOptions& options = {});

/// A world in which the other ranks do not exist: collectives return at once, with results of the
/// right sizes in which this rank's data stands for every rank's. For planning and for counting
/// traffic.
WorldPtr fake_world(int rank, int size);

/// The main function of one rank: runs `body` and returns 0. If it throws, prints one line on
/// standard error, with the rank and the message and without libtorch's stack, and ends the process
/// with status 1 at once, so that peers that wait for this rank end too; other objects of main()
/// are not destroyed. Ignores SIGXFSZ: a file above the size limit is an error.
///
///   int main() {
///     return comm::run_main([] {
///       const comm::WorldPtr world = comm::world_from_environment();
///       ...
///     });
///   }
int run_main(const std::function<void()>& body);

}  // namespace tessera::comm
TESSERA_API_END
