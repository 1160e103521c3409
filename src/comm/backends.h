// The back ends for collectives, except NCCL's, which is in libtessera_cuda.so
// (cuda/cuda_backend.h). A world chooses a back end for each group (rendezvous/store_world.cpp) and
// wraps it (checked/checked_communicator.h).

#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "group_info.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/placement.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// A group of one rank. A collective copies its input, or does nothing.
CommunicatorPtr make_solo_communicator();

/// A group of `size` ranks of which only `rank` exists. The data of this rank is used as the data
/// of all ranks. `start` returns the Work of a call. Without `start`, or if `start` returns
/// nullptr, the call is complete when the collective returns.
using LoopbackStart = std::function<WorkPtr(const char* collective, std::int64_t bytes)>;
CommunicatorPtr make_loopback_communicator(int rank, int size, LoopbackStart start);

/// Collectives of CPU tensors through shared memory. Collective; returns nullptr on every rank if
/// one of the ranks cannot reach the memory (because it is on another host or in another container)
/// or has TESSERA_SHM=0. Only this group may use `store`.
///
/// A call writes this rank's data to the shared memory and returns; Work::wait() reads the data of
/// the other ranks. A call first waits until the previous call is complete.
CommunicatorPtr make_shm_communicator(const detail::StorePtr& store, const GroupInfo& group);

/// The operator of c10d for `op`. NCCL implements all operators, Gloo all except the average.
detail::GroupReduceOp to_c10d(ReduceOp op);

/// Gloo over TCP between the ranks of `group`, for CPU tensors. Only this group may use `store`;
/// the other ranks reach this host at `address`. Collective. Reduce-scatter is an all-to-all and a
/// local sum, because libtorch's own implementation costs a whole all-reduce.
CommunicatorPtr make_gloo_communicator(const detail::StorePtr& store, const GroupInfo& group,
                                       const std::string& address);

/// Collectives of CUDA tensors through `host`, a communicator of CPU tensors; for ranks that share
/// a GPU, which NCCL does not support. A call copies its inputs to pinned memory, and therefore
/// waits for the current stream. Work::wait() copies the results back, on the stream that is then
/// current.
CommunicatorPtr make_staged_communicator(CommunicatorPtr host);

/// The Work of a collective that was complete when its call returned.
class DoneWork final : public Work {
 public:
  void wait() override {}
};

/// A shared DoneWork. One object serves all calls, because DoneWork has no state.
inline WorkPtr done_work() {
  static const WorkPtr done = std::make_shared<DoneWork>();
  return done;
}

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
