#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/trace.h"
#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// Options of a world: the device and the back end of its ranks, and time limits for waiting.
struct WorldOptions {
  std::string device = "cpu";    ///< "cpu" or "cuda"
  std::string backend = "gloo";  ///< "gloo" or "nccl"; gloo uses shared memory within a machine
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// The time after which a rank that waits for other ranks prints one line on stderr, with the
  /// ranks that have not arrived and what those ranks do; 0: no lines.
  std::chrono::milliseconds watchdog = std::chrono::seconds(30);
};

/// One rank's access to the ranks of a job and to process groups of these ranks. All communication
/// starts from a World and not from process-wide state, so that one process can contain several
/// ranks. World is thread safe; its communicators are not.
class World {
 public:
  virtual ~World() = default;
  virtual int rank() const = 0;  ///< index of this rank in the world, from 0
  virtual int size() const = 0;
  virtual int local_rank() const = 0;  ///< index of this rank on its machine, from 0
  virtual const WorldOptions& options() const = 0;
  /// Counts the traffic of all collectives of this rank.
  virtual TrafficCounter& traffic() = 0;
  /// Returns the process group of `ranks` (world ranks, in group order); messages call the group
  /// `name`. The first call is collective over exactly these ranks; later calls with the same ranks
  /// and name return the same group. A group of one rank does not communicate. Throws PeerError.
  /// Throws Error if `ranks` contains ranks that are not in the world or lacks this rank.
  virtual CommunicatorPtr group(const std::vector<int>& ranks, const std::string& name) = 0;
  /// Tells the world that a step of the program has ended, for messages such as "rank 1 ended after
  /// step 20".
  virtual void set_step([[maybe_unused]] std::int64_t step) {}
  /// Makes ranks that wait for this rank fail soon instead of at the time-out. Call abort() when a
  /// rank ends with an exception.
  virtual void abort() {}
  /// The index of this rank's GPU; -1 with device "cpu". A new thread of the program uses GPU 0
  /// until the thread sets another GPU; the library itself allocates on this rank's GPU on every
  /// thread.
  virtual int device_index() const { return -1; }
  /// Closes the world's groups on this rank; called when the rank's work is done. Groups close in
  /// the reverse order of their creation; an NCCL group closes on all of its ranks together.
  /// Meshes, tensors and Works can outlive the world, but group() and collectives then throw Error.
  /// A second call, or a call after abort(), does nothing. Throws PeerError if a rank of an NCCL
  /// group does not call shutdown(); the groups are then closed as well.
  virtual void shutdown() {}
  /// Like group(), but the group is for CPU tensors, even if the world's device is a GPU. The
  /// traffic of the group is not counted. The group is separate from the groups of group(), so that
  /// two threads can use both at the same time. The default implementation, which calls group(), is
  /// only for worlds that have no GPU and need no separate groups.
  virtual CommunicatorPtr host_group(const std::vector<int>& ranks, const std::string& name) {
    return group(ranks, name);
  }
};
/// A shared pointer to a world, which several meshes may use.
using WorldPtr = std::shared_ptr<World>;

/// WorldScope calls shutdown() of a World at the end of a scope, or abort() if an exception leaves
/// the scope. An NCCL world made on the main thread without a WorldScope is shut down when main()
/// returns; if the other ranks do not follow within 2 seconds, the world's groups are aborted.
class WorldScope : tessera::detail::NoCopy {
 public:
  explicit WorldScope(WorldPtr world)
      : world_(std::move(world)), exceptions_(std::uncaught_exceptions()) {}
  /// Calls shutdown() or abort(), whose exceptions become warnings.
  ~WorldScope();

  const WorldPtr& world() const { return world_; }

 private:
  WorldPtr world_;
  int exceptions_;
};

/// Makes the World that the launcher describes by environment variables: RANK, WORLD_SIZE,
/// LOCAL_RANK, MASTER_ADDR and MASTER_PORT (tessera-run, torchrun), or the variables of Slurm or
/// Open MPI. Without such variables, makes a world of one rank. Collective. After the call the
/// process ignores SIGPIPE, unless the process has a handler for SIGPIPE. The death of another rank
/// is then an error and does not end this process. Throws Error if variables contradict each other,
/// the port is in use, or a rank does not arrive within the time-out.
WorldPtr world_from_environment(const WorldOptions& options = {});

/// Makes the World of `size` ranks that another library (MPI, for example) has started. `rank` is
/// the rank of this process or thread. Rank 0 opens a c10d store on a free port, and every rank
/// calls `broadcast` once to learn the store's address. broadcast(bytes, count) must copy the
/// `count` bytes at `bytes` from rank 0 to all other ranks, like MPI_Bcast. The store listens on
/// all network interfaces of rank 0 until the process ends. Collective over the ranks, which must
/// pass equal options. Time-outs and SIGPIPE are as in world_from_environment. Throws Error on all
/// ranks if rank 0 cannot open the store, and for a rank that is not below `size`. Throws PeerError
/// if this rank cannot reach the store of rank 0.
WorldPtr world_from_broadcast(int rank, int size,
                              const std::function<void(void* bytes, std::size_t count)>& broadcast,
                              const WorldOptions& options = {});

/// Makes a World for each of `size` ranks that are threads of this process; result[r] is for rank
/// r.
std::vector<WorldPtr> thread_worlds(int size, const WorldOptions& options = {});

/// Makes a World of `size` ranks in which only rank `rank` exists. A collective returns at once, as
/// if every other rank had passed the same data as this rank. For planning and counting traffic.
WorldPtr fake_world(int rank, int size);

/// The main function of one rank: runs `body` and returns 0. If `body` throws, prints one line on
/// standard error, with the rank and the message and without libtorch's stack, and ends the process
/// with status 1 at once, so that ranks that wait for this rank also end. Objects outside `body`
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
