#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "group_info.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// Collectives of CPU tensors through memory that the ranks share. Collective; nullptr on every
/// rank if one of them cannot reach the memory (another host or container) or has TESSERA_SHM=0.
/// `store` is this group's alone.
///
/// A call puts this rank's data into the shared memory and returns; Work::wait() reads the peers'.
/// One call is under way at a time: the next one first waits for it.
CommunicatorPtr make_shm_communicator(const c10::intrusive_ptr<c10d::Store>& store,
                                      const GroupInfo& group);

}  // namespace tessera::comm
