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

DataMesh mesh_of(const std::string& name, const at::Tensor& tensor, const DataMesh& mesh,
                 const Options& options) {
  if (!options.parameter_mesh) {
    return mesh;
  }
  const std::optional<DeviceMesh> own = options.parameter_mesh(name, tensor);
  if (!own) {
    return mesh;
  }
  const bool has_replicas = *own && own->ndim() == 2;
  return has_replicas ? data_mesh_of(*own, options) : DataMesh(*own);
}

void check_extension(const std::string& name, const at::Tensor& tensor, const Options& options) {
  if (!options.all_gather_extension) {
    return;
  }
  const std::optional<AllGatherExtension> extension = options.all_gather_extension(name, tensor);
  TESSERA_CHECK(!extension || (extension->pre_all_gather && extension->post_all_gather),
                "fully_shard: the all-gather extension of parameter '", name, "' lacks ",
                extension->pre_all_gather    ? "post_all_gather"
                : extension->post_all_gather ? "pre_all_gather"
                                             : "both functions",
                "; give it both, or return nullopt");
}

void check_computes_in_floats(const MixedPrecisionPolicy& policy) {
  for (const auto& dtype : {policy.param_dtype, policy.reduce_dtype, policy.output_dtype}) {
    TESSERA_CHECK(!dtype || c10::isFloatingType(*dtype), "fully_shard: mp_policy names ", *dtype,
                  ", in which no gradient can be; name a floating-point type");
  }
}

ShardHome home_of(const DataMesh& mesh, const Options& options) {
  const c10::Device device = mesh.device();
  if (!options.offload_policy) {
    return {device, false};
  }
  return {c10::kCPU, options.offload_policy->pin_memory && !device.is_cpu()};
}

}  // namespace

DataMesh data_mesh_of(const DeviceMesh& mesh, const Options& options) {
  if (!options.shard_over_replicas) {
    return DataMesh(mesh);
  }
  TESSERA_CHECK(options.neighbours == 1, "fully_shard: neighbours = ", options.neighbours,
                " and shard_over_replicas both say which ranks keep what was gathered; leave one "
                "of them out");
  return DataMesh::sharding_over_replicas(mesh);
}

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
  const auto check_neighbours = [&](const DataMesh& own) {
    TESSERA_CHECK(options.neighbours >= 1 && own.shard.size() % options.neighbours == 0,
                  "fully_shard: neighbours = ", options.neighbours, " does not divide the ",
                  own.shard.size(), " ranks that shard; pass a divisor");
  };
  check_neighbours(mesh);
  check_computes_in_floats(options.mp_policy);
  for (const auto& [name, slot] : parameters) {
    const DataMesh own = mesh_of(name, slot->get(), mesh, options);
    check_neighbours(own);
    check_extension(name, slot->get(), options);
    sharded_spec(slot->get(), own, shard_dim(name, slot->get(), options.shard_placement), name);
  }
}

std::vector<GroupParameters> shard_parameters(const nn::NamedSlots& parameters,
                                              const DataMesh& mesh, const Options& options) {
  std::vector<GroupParameters> groups;
  for (const auto& [name, slot] : parameters) {
    const DataMesh own = mesh_of(name, slot->get(), mesh, options);
    const auto same_group = [&own,
                             dtype = slot->get().scalar_type()](const GroupParameters& group) {
      return group.parameters.front().dtype() == dtype && group.mesh.all == own.all;
    };
    auto group = std::ranges::find_if(groups, same_group);
    if (group == groups.end()) {
      group = groups.insert(groups.end(), GroupParameters{own, {}});
    }
    group->parameters.emplace_back(slot, name, own,
                                   shard_dim(name, slot->get(), options.shard_placement),
                                   home_of(own, options));
    if (own.all != mesh.all) {
      slot->set_distinct_over(mesh.all);
    }
  }
  return groups;
}

}  // namespace tessera::fsdp
