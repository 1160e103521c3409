#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memory/buffer_pool.h"
#include "tessera/comm/streams.h"
#include "tessera/export.h"
#include "tessera/fsdp/custom_collectives.h"

namespace tessera::fsdp {

class TESSERA_API Unit;

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

/// A unit's settings that may change between iterations. There is one object for a unit, which its
/// groups read as well; the setters in fully_shard.h and collectives.h say what each does.
struct Settings {
  std::string label;                          ///< what messages call the unit: "unit 'layers.3'"
  std::optional<bool> reshard_after_forward;  ///< default: not for the root
  bool reshard_after_backward = true;
  bool gradient_sync = true;
  bool all_reduce = true;  ///< false: reductions leave out the replicas until one does not
  bool last_backward = true;
  bool unshard_in_backward = true;
  bool unshard_async_op = false;           ///< gathers go to the compute lane
  bool force_sum = false;                  ///< no part of the division comes before the sum
  std::optional<double> gradient_divisor;  ///< default: the number of ranks of each group's mesh
  /// What the next forward's gathers wait for; default: all that was issued.
  std::optional<comm::StreamEventPtr> post_optim_event;
  std::vector<std::weak_ptr<Unit>> forward_prefetch;   ///< empty: what ran after, last time
  std::vector<std::weak_ptr<Unit>> backward_prefetch;  ///< empty: what ran before
  CollectiveHooks hooks;
  /// What messages call the units of the model that have Options::may_be_unused; one list for all.
  std::shared_ptr<const std::vector<std::string>> may_be_unused;

  /// The end of `error`, about ranks that call different collectives. None where that names a unit
  /// which has the option.
  std::string hint_of_unused_units(const std::string& error) const {
    const auto names = [&](const std::string& unit) {
      return error.find(unit) != std::string::npos;
    };
    return may_be_unused != nullptr && std::ranges::any_of(*may_be_unused, names)
               ? ""
               : "; a unit that only some ranks run needs Options::may_be_unused";
  }
  /// Whether more micro-batches of the step will come.
  bool step_goes_on() const { return !last_backward || !gradient_sync || !all_reduce; }
};

}  // namespace tessera::fsdp
