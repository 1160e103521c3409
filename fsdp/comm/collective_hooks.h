#pragma once

#include <memory>
#include <optional>

#include "memory/buffer_pool.h"
#include "tessera/comm/streams.h"
#include "tessera/fsdp/custom_collectives.h"

namespace tessera::fsdp {

/// Custom collectives of a unit, and hooks behind them; empty functions: none.
struct CollectiveHooks {
  AllGather all_gather;
  ReduceScatter reduce_scatter;
  /// Allocate the tensors of each; nullptr: default allocation.
  std::shared_ptr<const AllocateBuffer> gather_allocator;
  std::shared_ptr<const AllocateBuffer> reduction_allocator;
  AllReduceHook all_reduce;
  std::optional<comm::Lane> all_reduce_lane;  ///< empty: the reduction's own
  /// What is sent and received is in memory that the groups allocate.
  bool memory_of_groups = false;

  /// Whether gathers use buffers even where a communicator could work in place.
  bool packs_gathers() const { return all_gather || gather_allocator || memory_of_groups; }
  bool packs_reductions() const {
    return reduce_scatter || reduction_allocator || memory_of_groups;
  }
  /// Whether units call anything but the communicators, or in memory that these do not choose.
  bool any_custom() const {
    return all_gather || reduce_scatter || gather_allocator || reduction_allocator;
  }
  /// Who allocates the tensors of `group`'s collectives.
  MemorySource gather_memory(comm::Communicator& group) const {
    return memory(group, gather_allocator);
  }
  MemorySource reduction_memory(comm::Communicator& group) const {
    return memory(group, reduction_allocator);
  }

 private:
  MemorySource memory(comm::Communicator& group,
                      const std::shared_ptr<const AllocateBuffer>& allocate) const {
    return allocate || memory_of_groups ? MemorySource{&group, allocate} : MemorySource{};
  }
};

}  // namespace tessera::fsdp
