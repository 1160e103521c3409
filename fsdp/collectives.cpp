#include "tessera/fsdp/collectives.h"

#include <utility>

#include "tessera/core/error.h"
#include "unit.h"
#include "unit_lookup.h"

namespace tessera::fsdp {

void set_custom_all_gather(nn::ModuleBase& module, AllGather all_gather, bool recurse) {
  for (const auto& unit : units_of(module, recurse, "set_custom_all_gather")) {
    unit->collective_hooks().all_gather = all_gather;
  }
}

void set_custom_reduce_scatter(nn::ModuleBase& module, ReduceScatter reduce_scatter, bool recurse) {
  for (const auto& unit : units_of(module, recurse, "set_custom_reduce_scatter")) {
    unit->collective_hooks().reduce_scatter = reduce_scatter;
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
