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
  /// The time after which a waiting rank prints the ranks that have not arrived, on stderr. 0: no
  /// printing.
  std::chrono::milliseconds watchdog = std::chrono::seconds(30);
};

/// One rank's access to the ranks of a job, and to process groups of these ranks. Not global state:
/// one process can contain several ranks. Thread safe, but the communicators are not.
class World {
 public:
  virtual ~World() = default;
  virtual int rank() const = 0;  ///< index of this rank in the world, from 0
  virtual int size() const = 0;
  virtual int local_rank() const = 0;  ///< index of this rank on its machine, from 0
  virtual const WorldOptions& options() const = 0;
  /// Counts the traffic of all collectives of this rank.
  virtual TrafficCounter& traffic() = 0;
  /// Returns the process group of `ranks` (world ranks, in group order). `name`: for messages.
  /// Later calls with the same arguments return the same group. The first call is collective over
  /// `ranks`. Throws PeerError. Throws Error if `ranks` lacks this rank or contains ranks outside
  /// the world.
  virtual CommunicatorPtr group(const std::vector<int>& ranks, const std::string& name) = 0;
  /// Tells the world that a step of the program has ended, for messages such as "rank 1 ended after
  /// step 20".
  virtual void set_step([[maybe_unused]] std::int64_t step) {}
  /// Makes ranks that wait for this rank fail soon instead of at the time-out. Call abort() when a
  /// rank ends with an exception.
  virtual void abort() {}
  /// The index of this rank's GPU; -1 with device "cpu". A new thread of the program uses GPU 0
  /// until the thread sets another GPU.
  virtual int device_index() const { return -1; }
  /// Closes this rank's groups; called when the rank's work is done. An NCCL group closes on all of
  /// its ranks together. Meshes and tensors can outlive the world, but group() and collectives then
  /// throw Error. A second call does nothing. Rank 0 of a world_from_environment() serves the
  /// job's store, and waits until all ranks have called shutdown() or ended, at most for the
  /// time-out (not if torchrun's agent serves the store). Throws PeerError if a rank of
  /// an NCCL group does not call shutdown().
  virtual void shutdown() {}
  /// Like group(), but for CPU tensors, and with no traffic counted. The group is separate from
  /// group(), so two threads can use both. The default implementation calls group(), and is only
  /// for worlds without a GPU.
  virtual CommunicatorPtr host_group(const std::vector<int>& ranks, const std::string& name) {
    return group(ranks, name);
  }
};
/// A shared pointer to a world, which several meshes may use.
using WorldPtr = std::shared_ptr<World>;

/// Calls shutdown() of a World at the end of a scope, or abort() if an exception leaves the scope.
/// Without a WorldScope, an NCCL world of the main thread is shut down when main() returns.
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

/// Makes the World from the environment variables of tessera-run, torchrun, Slurm or Open MPI.
/// Without such variables, makes a world of one rank. Collective. Ignores SIGPIPE from then on,
/// unless the process has a handler. Throws Error if variables contradict each other, the port is
/// in use, or a rank is late.
WorldPtr world_from_environment(const WorldOptions& options = {});

/// Makes the World of `size` ranks that another library has started. `rank`: this rank.
/// broadcast(bytes, count) must copy `count` bytes from rank 0 to all ranks, like MPI_Bcast. Rank 0
/// opens a c10d store on a free port of all network interfaces. Collective; all ranks pass equal
/// options. Throws Error if rank 0 cannot open the store, or for an invalid `rank`. Throws
/// PeerError if rank 0 cannot be reached.
WorldPtr world_from_broadcast(int rank, int size,
                              const std::function<void(void* bytes, std::size_t count)>& broadcast,
                              const WorldOptions& options = {});

/// Makes a World for each of `size` ranks that are threads of this process; result[r] is for rank
/// r.
std::vector<WorldPtr> thread_worlds(int size, const WorldOptions& options = {});

/// Makes a World of `size` ranks in which only `rank` exists, for planning and counting traffic.
/// Collectives act as if all ranks had this rank's data.
WorldPtr fake_world(int rank, int size);

/// The main function of one rank: runs `body` and returns 0. If `body` throws, prints one line on
/// standard error, and ends the process with status 1 without destroying objects outside `body`.
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
