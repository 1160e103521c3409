#include "unit_parameters.h"

#include <algorithm>
#include <optional>
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

/// The dimension to shard, or nullopt to replicate.
std::optional<std::int64_t> shard_dim(const std::string& name, const at::Tensor& tensor,
                                      const PlacementFunction& function) {
  const std::optional<Placement> wanted = function ? function(name, tensor) : std::nullopt;
  if (tensor.dim() == 0 || (wanted && is_replicate(*wanted))) {
    return std::nullopt;
  }
  if (!wanted) {
    return 0;
  }
  const auto* shard = std::get_if<Shard>(&*wanted);
  TESSERA_CHECK(shard != nullptr && shard->dim < tensor.dim() && shard->dim >= -tensor.dim(),
                "fully_shard: ", to_string(*wanted), " was asked for parameter '", name,
                "' of sizes ", tensor.sizes(), "; return Shard of one of its dimensions, ",
                "Replicate() or nullopt");
  return shard->dim < 0 ? shard->dim + tensor.dim() : shard->dim;
}

struct Wanted {
  nn::SlotPtr slot;
  std::string name;
  std::optional<std::int64_t> dim;
};

/// The parameters to shard; everything is checked before the first is touched.
std::vector<Wanted> wanted_parameters(const Territory& territory, const DataMesh& mesh,
                                      const Options& options) {
  std::vector<Wanted> wanted;
  for (const auto& [name, slot] : territory.slots) {
    if (!options.ignored.contains(slot)) {
      check_owned(territory, name, *slot);
      wanted.push_back({slot, name, shard_dim(name, slot->get(), options.shard_placement)});
      sharded_spec(slot->get(), mesh, wanted.back().dim, name);
    }
  }
  return wanted;
}

}  // namespace

std::vector<std::vector<ShardedParameter>> shard_parameters(
    const std::vector<nn::ModuleBase*>& modules, const DataMesh& mesh, const Options& options) {
  Territory territory;
  for (std::size_t i = 0; i < modules.size(); ++i) {
    modules[i]->named_slots();  // refuses modules whose parameters have no slots
    territory.add(*modules[i], modules.size() == 1 ? "" : std::to_string(i) + ".");
  }
  std::vector<std::vector<ShardedParameter>> groups;
  for (const Wanted& wanted : wanted_parameters(territory, mesh, options)) {
    const auto same_type = [&](const std::vector<ShardedParameter>& group) {
      return group.front().dtype() == wanted.slot->get().scalar_type();
    };
    auto group = std::ranges::find_if(groups, same_type);
    if (group == groups.end()) {
      group = groups.insert(groups.end(), std::vector<ShardedParameter>{});
    }
    group->emplace_back(wanted.slot, wanted.name, mesh, wanted.dim);
  }
  return groups;
}

}  // namespace tessera::fsdp
