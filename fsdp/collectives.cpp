#include "tessera/fsdp/collectives.h"

#include <memory>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "unit.h"
#include "unit_lookup.h"

namespace tessera::fsdp {

namespace {

/// The units of a call of `asked`, of which none `refuses`: whoever calls a collective says where
/// its memory comes from.
template <class Refuses>
std::vector<std::shared_ptr<Unit>> units_without(const nn::ModuleBase& module, bool recurse,
                                                 const char* asked, Refuses&& refuses) {
  const std::vector<std::shared_ptr<Unit>> units = units_of(module, recurse, asked);
  for (const std::shared_ptr<Unit>& unit : units) {
    TESSERA_CHECK(!refuses(unit->collective_hooks()), asked, ": ", unit->label(),
                  " would have both a collective of its own and memory of the process group; take "
                  "away the one that was set before");
  }
  return units;
}

}  // namespace

void set_custom_all_gather(nn::ModuleBase& module, AllGather all_gather, bool recurse) {
  const auto refuses = [&](const CollectiveHooks& hooks) {
    return all_gather && hooks.memory_of_groups;
  };
  for (const auto& unit : units_without(module, recurse, "set_custom_all_gather", refuses)) {
    unit->collective_hooks().all_gather = all_gather;
  }
}

void set_custom_reduce_scatter(nn::ModuleBase& module, ReduceScatter reduce_scatter, bool recurse) {
  const auto refuses = [&](const CollectiveHooks& hooks) {
    return reduce_scatter && hooks.memory_of_groups;
  };
  for (const auto& unit : units_without(module, recurse, "set_custom_reduce_scatter", refuses)) {
    unit->collective_hooks().reduce_scatter = reduce_scatter;
  }
}

void set_allocate_memory_from_process_group_for_comm(nn::ModuleBase& module, bool allocate,
                                                     bool recurse) {
  const auto refuses = [&](const CollectiveHooks& hooks) {
    return allocate && (hooks.all_gather || hooks.reduce_scatter);
  };
  for (const auto& unit :
       units_without(module, recurse, "set_allocate_memory_from_process_group_for_comm", refuses)) {
    unit->collective_hooks().memory_of_groups = allocate;
  }
}

void set_all_reduce_hook(nn::ModuleBase& module, AllReduceHook hook, bool recurse) {
  for (const auto& unit : units_of(module, recurse, "set_all_reduce_hook")) {
    unit->collective_hooks().all_reduce = hook;
  }
}

void set_post_optim_event(nn::ModuleBase& root, comm::StreamEventPtr event) {
  const std::shared_ptr<Unit> unit = unit_of(root, "set_post_optim_event");
  TESSERA_CHECK(!unit->is_below_root(), "set_post_optim_event: ", unit->label(),
                " is not the root; pass the module whose forward is called");
  unit->settings().post_optim_event = std::move(event);
}

void share_context(const std::vector<nn::ModuleBase*>& roots) {
  CommunicationPtr shared;
  for (const nn::ModuleBase* root : roots) {
    const std::shared_ptr<Unit> unit = unit_of(*root, "share_context");
    if (shared == nullptr) {
      shared = unit->shared_communication();
    }
    for (const auto& below : units_of(*root, true, "share_context")) {
      below->set_communication(shared);
    }
  }
}

}  // namespace tessera::fsdp
