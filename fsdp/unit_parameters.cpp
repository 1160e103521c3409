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

ShardHome home_of(const DataMesh& mesh, const Options& options) {
  const c10::Device device = mesh.device();
  if (!options.offload_policy) {
    return {device, false};
  }
  return {c10::kCPU, options.offload_policy->pin_memory && !device.is_cpu()};
}

}  // namespace

nn::NamedSlots free_parameters(const std::vector<nn::ModuleBase*>& modules,
                               const Options& options) {
  Territory territory;
  for (std::size_t i = 0; i < modules.size(); ++i) {
    modules[i]->named_slots();  // refuses modules whose parameters have no slots
    territory.add(*modules[i], modules.size() == 1 ? "" : std::to_string(i) + ".");
  }
  nn::NamedSlots parameters;
  for (const auto& [name, slot] : territory.slots) {
    if (!options.ignored.contains(slot)) {
      check_owned(territory, name, *slot);
      parameters.emplace_back(name, slot);
    }
  }
  return parameters;
}

void check_parameters(const nn::NamedSlots& parameters, const DataMesh& mesh,
                      const Options& options) {
  for (const auto& [name, slot] : parameters) {
    sharded_spec(slot->get(), mesh, shard_dim(name, slot->get(), options.shard_placement), name);
  }
}

std::vector<std::vector<ShardedParameter>> shard_parameters(const nn::NamedSlots& parameters,
                                                            const DataMesh& mesh,
                                                            const Options& options) {
  const ShardHome home = home_of(mesh, options);
  std::vector<std::vector<ShardedParameter>> groups;
  for (const auto& [name, slot] : parameters) {
    const auto same_type = [&type = *slot](const std::vector<ShardedParameter>& group) {
      return group.front().dtype() == type.get().scalar_type();
    };
    auto group = std::ranges::find_if(groups, same_type);
    if (group == groups.end()) {
      group = groups.insert(groups.end(), std::vector<ShardedParameter>{});
    }
    group->emplace_back(slot, name, mesh, shard_dim(name, slot->get(), options.shard_placement),
                        home);
  }
  return groups;
}

}  // namespace tessera::fsdp
