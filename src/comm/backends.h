// Declares the back ends for collectives, except NCCL (cuda/cuda_backend.h). A World chooses a back
// end for each process group (rendezvous/store_world.cpp) and wraps the back end in a
// CheckedCommunicator (checked/checked_communicator.h).

#pragma once

#include <cstdint>
#include <string>

#include "group_info.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// Makes a process group of which only this rank exists. Collectives use this rank's data as the
/// data of the other ranks. `start`: see fake_world().
CommunicatorPtr make_loopback_communicator(GroupInfo group, FakeStart start = {});

/// Makes a process group for CPU tensors that uses shared memory. Collective. Returns nullptr on
/// every rank if a rank cannot map the memory or has TESSERA_SHM=0. Only this process group may use
/// `store`.
CommunicatorPtr make_shm_communicator(const detail::StorePtr& store, const GroupInfo& group);

/// Converts a ReduceOp to c10d's type. NCCL implements all operators, Gloo all except averages.
detail::GroupReduceOp to_c10d(ReduceOp op);

/// Makes a process group for CPU tensors that uses Gloo over TCP. Collective. Only this process
/// group may use `store`. `address`: this machine's address for other ranks.
CommunicatorPtr make_gloo_communicator(const detail::StorePtr& store, const GroupInfo& group,
                                       const std::string& address);

/// Makes a process group for CUDA tensors of ranks that share a GPU. `host`: a communicator for CPU
/// tensors. A collective waits for the current stream and copies inputs to the CPU. Work::wait()
/// copies the results back.
CommunicatorPtr make_staged_communicator(CommunicatorPtr host);

/// The Work of a synchronous collective, which is already complete: wait() returns at once.
class DoneWork final : public Work {
 public:
  void wait() override {}
};

inline WorkPtr done_work() {
  static const WorkPtr done = std::make_shared<DoneWork>();
  return done;
}

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
