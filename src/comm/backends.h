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
/// every rank if a rank cannot map the memory (a rank on another machine or in another container)
/// or has TESSERA_SHM=0. Only this process group may use `store`.
///
/// A collective waits until the previous collective is complete, writes this rank's data to the
/// shared memory, and returns; Work::wait() reads the data of the other ranks.
CommunicatorPtr make_shm_communicator(const detail::StorePtr& store, const GroupInfo& group);

/// Converts a ReduceOp to c10d's type. NCCL implements all operators, Gloo all except averages.
detail::GroupReduceOp to_c10d(ReduceOp op);

/// Makes a process group for CPU tensors that uses Gloo over TCP. Collective. Only this process
/// group may use `store`. `address`: this machine's address for other ranks. Reduce-scatter is an
/// all-to-all and a local sum: libtorch's reduce-scatter sends as many bytes as an all-reduce.
CommunicatorPtr make_gloo_communicator(const detail::StorePtr& store, const GroupInfo& group,
                                       const std::string& address);

/// Makes a process group for CUDA tensors of ranks that share a GPU. NCCL does not support such
/// ranks. `host`: a communicator for CPU tensors, which sends the data. A collective copies its
/// inputs to pinned memory, and therefore waits for the current CUDA stream. Work::wait() copies
/// the results to the GPU on the stream that is current in wait().
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
