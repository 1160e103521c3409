#pragma once

#include "tessera/fsdp/collectives.h"

namespace tessera::fsdp {

/// What replaces or follows the collectives of a unit; empty functions: nothing does.
struct CollectiveHooks {
  AllGather all_gather;
  ReduceScatter reduce_scatter;
  AllReduceHook all_reduce;
  /// What is sent and received lies in memory that the groups allocate.
  bool memory_of_groups = false;

  /// Whether there are buffers at all, even where a communicator could do without.
  bool packs_gathers() const { return all_gather || memory_of_groups; }
  bool packs_reductions() const { return reduce_scatter || memory_of_groups; }
  /// Who allocates the buffers of `group`'s collectives, as BufferPool takes it.
  comm::Communicator* allocator(comm::Communicator& group) const {
    return memory_of_groups ? &group : nullptr;
  }
};

}  // namespace tessera::fsdp
