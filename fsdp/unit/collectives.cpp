// The setters of collectives.h: custom collectives, hooks and memory of units. A setter checks all
// units of its call before it changes the first. Like those in fully_shard.cpp they only store;
// CollectiveHooks says what a unit does with each.

#include "tessera/fsdp/collectives.h"

#include <memory>
#include <utility>

#include "tessera/core/error.h"
#include "unit/attached_units.h"
#include "unit/unit.h"

namespace tessera::fsdp {

namespace {

/// The units of a call of `asked`. Throws Error if one `refuses`: a custom collective chooses its
/// memory itself.
template <class Refuses>
std::vector<std::shared_ptr<Unit>> units_without(const nn::ModuleBase& module, bool recurse,
                                                 const char* asked, Refuses&& refuses) {
  std::vector<std::shared_ptr<Unit>> units = units_of(module, recurse, asked);
  for (const std::shared_ptr<Unit>& unit : units) {
    TESSERA_CHECK(!refuses(unit->settings().hooks), asked, ": ", unit->label(),
                  " would have both its own collective and memory of the process group; take "
                  "away the one that was set before");
  }
  return units;
}

using SharedAllocator = std::shared_ptr<const AllocateBuffer>;

/// Sets `collective` and what allocates its buffers, which units share.
template <class Collective>
void set_custom(const nn::ModuleBase& module, bool recurse, const char* asked,
                const Collective& collective, Collective CollectiveHooks::*own,
                AllocateBuffer allocate, SharedAllocator CollectiveHooks::*allocator) {
  // Checked with the new function, so that removing a collective is always allowed.
  const auto units = units_without(module, recurse, asked, [&](const CollectiveHooks& hooks) {
    return (collective || allocate) && hooks.memory_of_groups;
  });
  const SharedAllocator shared =
      allocate ? std::make_shared<const AllocateBuffer>(std::move(allocate)) : nullptr;
  for (const std::shared_ptr<Unit>& unit : units) {
    unit->settings().hooks.*own = collective;
    unit->settings().hooks.*allocator = shared;
  }
}

}  // namespace

void set_custom_all_gather(nn::ModuleBase& module, AllGather all_gather, AllocateBuffer allocate,
                           bool recurse) {
  set_custom(module, recurse, "set_custom_all_gather", all_gather, &CollectiveHooks::all_gather,
             std::move(allocate), &CollectiveHooks::gather_allocator);
}

void set_custom_reduce_scatter(nn::ModuleBase& module, ReduceScatter reduce_scatter,
                               AllocateBuffer allocate, bool recurse) {
  set_custom(module, recurse, "set_custom_reduce_scatter", reduce_scatter,
             &CollectiveHooks::reduce_scatter, std::move(allocate),
             &CollectiveHooks::reduction_allocator);
}

void set_allocate_memory_from_process_group_for_comm(nn::ModuleBase& module, bool allocate,
                                                     bool recurse) {
  const auto refuses = [&](const CollectiveHooks& hooks) { return allocate && hooks.any_custom(); };
  for (const auto& unit :
       units_without(module, recurse, "set_allocate_memory_from_process_group_for_comm", refuses)) {
    unit->settings().hooks.memory_of_groups = allocate;
  }
}

void set_all_reduce_hook(nn::ModuleBase& module, AllReduceHook hook, bool recurse) {
  for (const auto& unit : units_of(module, recurse, "set_all_reduce_hook")) {
    unit->settings().hooks.all_reduce = hook;
    // A lane that was set with an earlier hook belongs to that hook.
    unit->settings().hooks.all_reduce_lane.reset();
  }
}

void set_all_reduce_hook(nn::ModuleBase& module, AllReduceHook hook, comm::Lane lane,
                         bool recurse) {
  const auto units = units_of(module, recurse, "set_all_reduce_hook");
  for (const std::shared_ptr<Unit>& unit : units) {
    // Replicas are all-reduced in the reduction's lane, and the hook comes after.
    for (const ParameterGroup& group : unit->groups()) {
      TESSERA_CHECK(group.mesh().replicas() == 1, "set_all_reduce_hook: ", unit->label(),
                    " is all-reduced over ", group.mesh().replicas(),
                    " replicas, after which its hook runs at once; leave out the lane");
    }
  }
  for (const std::shared_ptr<Unit>& unit : units) {
    unit->settings().hooks.all_reduce = hook;
    unit->settings().hooks.all_reduce_lane = hook ? std::optional(lane) : std::nullopt;
  }
}

void set_post_optim_event(nn::ModuleBase& root, comm::StreamEventPtr event) {
  const std::shared_ptr<Unit> unit = unit_of(root, "set_post_optim_event");
  TESSERA_CHECK(!unit->is_below_root(), "set_post_optim_event: ", unit->label(),
                " is not the root; pass the module whose forward is called");
  unit->settings().post_optim_event = std::move(event);
}

void share_context(const std::vector<nn::ModuleBase*>& roots) {
  CommContextPtr shared;
  for (const nn::ModuleBase* root : roots) {
    const std::shared_ptr<Unit> unit = unit_of(*root, "share_context");
    // The first root's context, with the work under way in it.
    if (shared == nullptr) {
      shared = unit->parameters().shared_comm_context();
    }
    for (const auto& below : units_of(*root, true, "share_context")) {
      // Settles what is under way in the old context, before its pool goes.
      below->parameters().set_comm_context(shared);
    }
  }
}

}  // namespace tessera::fsdp
