#include "unit_parameters.h"

#include <algorithm>
#include <string>
#include <unordered_set>

#include "sharded_spec.h"
#include "tessera/core/error.h"
#include "unit.h"

namespace tessera::fsdp {
namespace {

/// The slots of a module and of those below it that are in no unit.
struct Territory {
  nn::NamedSlots slots;
  std::unordered_set<const nn::ModuleBase*> modules;
  std::unordered_set<const nn::ParameterSlot*> seen;

  void add(const torch::nn::Module& module, const std::string& prefix) {
    if (const auto* ours = dynamic_cast<const nn::ModuleBase*>(&module)) {
      if (ours->attached<Unit>() != nullptr) {
        return;
      }
      modules.insert(ours);
      for (const auto& [name, slot] : ours->slots()) {
        if (seen.insert(slot.get()).second) {
          slots.emplace_back(prefix + name, slot);
        }
      }
    }
    for (const auto& child : module.named_children()) {
      add(*child.value(), prefix + child.key() + ".");
    }
  }
};

void check_owned(const Territory& territory, const std::string& name,
                 const nn::ParameterSlot& slot) {
  for (const nn::ParameterSlot::Owner& owner : slot.owners()) {
    TESSERA_CHECK(territory.modules.contains(owner.module), "fully_shard: parameter '", name,
                  "' is shared with a ", owner.module->name(),
                  " outside of this unit; apply fully_shard to the lowest module that holds both");
  }
}

}  // namespace

std::vector<std::vector<ShardedParameter>> shard_parameters(nn::ModuleBase& module,
                                                            const DeviceMesh& mesh) {
  module.named_slots();  // refuses modules whose parameters have no slots
  Territory territory;
  territory.add(module, "");
  for (const auto& [name, slot] : territory.slots) {
    check_owned(territory, name, *slot);
    TESSERA_CHECK(
        slot->get().dim() > 0, "fully_shard: parameter '", name,
        "' has no dimensions and cannot be split; make it of one dimension and one element");
    sharded_spec(slot->get(), mesh, 0, name);
  }
  std::vector<std::vector<ShardedParameter>> groups;
  for (const auto& [name, slot] : territory.slots) {
    const auto same_type = [&, &tensor = slot->get()](const std::vector<ShardedParameter>& group) {
      return group.front().dtype() == tensor.scalar_type();
    };
    auto group = std::ranges::find_if(groups, same_type);
    if (group == groups.end()) {
      group = groups.insert(groups.end(), std::vector<ShardedParameter>{});
    }
    group->emplace_back(slot, name, mesh, 0);
  }
  return groups;
}

}  // namespace tessera::fsdp
