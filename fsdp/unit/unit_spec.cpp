// From options to the decisions of a unit: which parameters it has, and for each its placement,
// mesh, device and extension. All functions of the caller are called and all results checked here,
// before a parameter is changed; a plan uses the same functions.

#include "unit/unit_spec.h"

#include <algorithm>
#include <string>
#include <unordered_set>

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "unit/attached_units.h"
#include "unit/stock_modules.h"

namespace tessera::fsdp {
namespace {

/// The slots of a module and of those below it that are in no unit.
struct Territory {
  nn::NamedSlots slots;
  std::unordered_set<const nn::ModuleBase*> modules;
  std::unordered_set<const nn::ParameterSlot*> seen;

  /// `prefix`: of the names.
  void add(const nn::ModuleBase& root, const std::string& prefix) {
    const auto add_module = [&](const std::string& fqn, const nn::ModuleBase& module) {
      modules.insert(&module);
      for (const auto& [name, slot] : module.slots()) {
        if (seen.insert(slot.get()).second) {
          slots.emplace_back(prefix + nn::join_fqn(fqn, name), slot);
        }
      }
    };
    nn::visit_modules(root, add_module, outside_of_units());
  }
};

void check_owned(const Territory& territory, const std::string& name,
                 const nn::ParameterSlot& slot) {
  // Modules outside that share it would run with the shard instead of the parameter.
  for (const nn::ParameterSlot::Owner& owner : slot.owners()) {
    TESSERA_CHECK(territory.modules.contains(owner.module), "fully_shard: parameter '", name,
                  "' is shared with a ", owner.module->name(),
                  " outside of this unit; apply fully_shard to the lowest module that holds both");
  }
}

/// The placement of `tensor` on the dimension that shards, from the option's function.
Placement placement_of(const std::string& name, const at::Tensor& tensor,
                       const PlacementFunction& function) {
  // A scalar has no dimension to split, and the option's function is not called.
  if (tensor.dim() == 0) {
    return Replicate{};
  }
  Placement placement = (function ? function(name, tensor) : std::nullopt).value_or(Shard{0});
  if (auto* shard = std::get_if<Shard>(&placement)) {
    // Negative ones count from the end; those out of range stay so, for shard_dim() to refuse.
    shard->dim += shard->dim < 0 && shard->dim >= -tensor.dim() ? tensor.dim() : 0;
  }
  return placement;
}

DataMesh mesh_of(const std::string& name, const at::Tensor& tensor, const DataMesh& mesh,
                 const Options& options) {
  const std::optional<DeviceMesh> own =
      options.parameter_mesh ? options.parameter_mesh(name, tensor) : std::nullopt;
  if (!own) {
    return mesh;
  }
  // shard_over_replicas is of the unit's replicas; a mesh of one dimension has none.
  const bool has_replicas = *own && own->ndim() == 2;
  return has_replicas ? data_mesh_of(*own, options) : DataMesh(*own);
}

/// The dimension to shard, or nullopt to replicate.
std::optional<std::int64_t> shard_dim(const std::string& name, const at::Tensor& tensor,
                                      const Placement& placement) {
  if (is_replicate(placement)) {
    return std::nullopt;
  }
  const auto* shard = std::get_if<Shard>(&placement);
  TESSERA_CHECK(shard != nullptr && shard->dim < tensor.dim() && shard->dim >= 0,
                "fully_shard: ", to_string(placement), " was asked for parameter '", name,
                "' of sizes ", tensor.sizes(), "; return Shard of one of its dimensions, ",
                "Replicate() or nullopt");
  return shard->dim;
}

void check_extension(const std::string& name, const std::optional<AllGatherExtension>& extension) {
  TESSERA_CHECK(!extension || (extension->pre_all_gather && extension->post_all_gather),
                "fully_shard: the all-gather extension of parameter '", name, "' lacks ",
                extension->pre_all_gather    ? "post_all_gather"
                : extension->post_all_gather ? "pre_all_gather"
                                             : "both functions",
                "; give it both, or return nullopt");
}

/// Every post-forward mesh must be whole: ranks side by side, as many as the option says.
void check_post_forward_mesh(const DataMesh& mesh, std::int64_t size) {
  TESSERA_CHECK(size >= 1 && mesh.shard.size() % size == 0,
                "fully_shard: post_forward_mesh_size = ", size, " does not divide the ",
                mesh.shard.size(), " ranks that shard; pass a divisor");
}

/// An integer type would make the parameters, their gradients or the results integers.
void check_computes_in_floats(const MixedPrecisionPolicy& policy) {
  for (const auto& dtype : {policy.param_dtype, policy.reduce_dtype, policy.output_dtype}) {
    TESSERA_CHECK(!dtype || c10::isFloatingType(*dtype), "fully_shard: mp_policy names ", *dtype,
                  ", in which no gradient can be; name a floating-point type");
  }
}

ShardHome home_of(const DataMesh& mesh, const Options& options) {
  const c10::Device device = mesh.device();
  if (!options.offload_policy) {
    return {.device = device};
  }
  // Page-locked memory speeds up copies to a GPU; on a CPU there are no such copies.
  return {.device = c10::kCPU,
          .pinned = options.offload_policy->pin_memory && !device.is_cpu(),
          .offloaded = true};
}

/// A joined mesh would name a dimension twice.
void check_not_split(const std::string& name, const nn::ParameterSlot& slot, const DataMesh& mesh) {
  const at::Tensor& tensor = slot.persistent();
  if (!tessera::is_distributed(tensor)) {
    return;
  }
  const DeviceMesh& known = sharding_spec(tensor).mesh;
  TESSERA_CHECK(!slot.has_persistent(), "fully_shard: parameter '", name, "' is split over ",
                to_string(known),
                " already, by a unit above; apply fully_shard to the lower modules first");
  TESSERA_CHECK(known != mesh.all, "fully_shard: parameter '", name, "' is split over ",
                to_string(known),
                " already, by parallelize_module or distribute_module; give the two different "
                "dimensions of one mesh, for example mesh[\"tp\"] and mesh[\"dp\"]");
}

}  // namespace

DataMesh data_mesh_of(const DeviceMesh& mesh, const Options& options) {
  if (!options.shard_over_replicas) {
    return DataMesh(mesh);
  }
  TESSERA_CHECK(options.post_forward_mesh_size == 1,
                "fully_shard: post_forward_mesh_size = ", options.post_forward_mesh_size,
                " and shard_over_replicas both say which ranks keep what was gathered; leave one "
                "of them out");
  return DataMesh::sharding_over_replicas(mesh);
}

nn::NamedSlots free_parameters(const std::vector<nn::ModuleBase*>& modules,
                               const Options& options) {
  Territory territory;
  for (std::size_t i = 0; i < modules.size(); ++i) {
    modules[i]->named_slots();  // refuses modules whose parameters have no slots
    // Modules of one unit may have parameters of one name, which messages tell apart.
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

std::vector<ParameterChoice> choose(const nn::NamedSlots& parameters, const DataMesh& mesh,
                                    const Options& options) {
  std::vector<ParameterChoice> choices;
  for (const auto& [name, slot] : parameters) {
    const at::Tensor& tensor = slot->persistent();
    const ExtensionFunction& extension = options.all_gather_extension;
    choices.push_back({placement_of(name, tensor, options.shard_placement),
                       mesh_of(name, tensor, mesh, options),
                       extension ? extension(name, tensor) : std::nullopt});
  }
  return choices;
}

UnitSpec checked_spec(const std::vector<nn::ModuleBase*>& modules, const nn::NamedSlots& parameters,
                      const std::vector<ParameterChoice>& choices, const DataMesh& mesh,
                      const Options& options) {
  check_post_forward_mesh(mesh, options.post_forward_mesh_size);
  check_computes_in_floats(options.mp_policy);
  refuse_sparse_gradients(parameters);
  UnitSpec spec{modules, mesh, options, {}};
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, slot] = parameters[i];
    const ParameterChoice& choice = choices[i];
    // A parameter of another mesh keeps pieces on that mesh, of other ranks.
    check_post_forward_mesh(choice.mesh, options.post_forward_mesh_size);
    check_extension(name, choice.extension);
    check_not_split(name, *slot, choice.mesh);
    const std::optional<std::int64_t> dim = shard_dim(name, slot->get(), choice.placement);
    const std::string called =
        tessera::detail::concat("parameter '", name, "' of a unit of ", modules.front()->name());
    spec.parameters.push_back({.name = name,
                               .slot = slot,
                               .mesh = choice.mesh,
                               .dim = dim,
                               .parts = parts_of(slot->get(), dim),
                               .sharding = sharded_spec(slot->get(), choice.mesh, dim, called),
                               .home = home_of(choice.mesh, options),
                               .extension = choice.extension});
  }
  return spec;
}

/// In the order of the first parameter of each: the same on every rank.
std::vector<std::vector<ParameterSpec>> grouped(const UnitSpec& spec) {
  std::vector<std::vector<ParameterSpec>> groups;
  for (const ParameterSpec& parameter : spec.parameters) {
    const auto group = std::ranges::find_if(groups, [&](const std::vector<ParameterSpec>& known) {
      const ParameterSpec& first = known.front();
      return first.slot->get().scalar_type() == parameter.slot->get().scalar_type() &&
             first.mesh.all == parameter.mesh.all;
    });
    if (group == groups.end()) {
      groups.push_back({parameter});
    } else {
      group->push_back(parameter);
    }
  }
  return groups;
}

}  // namespace tessera::fsdp
