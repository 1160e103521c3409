#include "tessera/nn/module.h"
#include "unit.h"

#include <c10/util/Exception.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <numeric>

#include "tessera/nn/detail/adopted_module.h"

namespace tessera::fsdp {

// checked_spec() decides the parameters of a unit, and the placement, mesh and device of each
// parameter. All checks precede all changes of parameters.

namespace {

/// Returns the placement of `tensor` on the shard dimension (Options::shard_placement).
Placement placement_of(const std::string& name, const at::Tensor& tensor,
                       const PlacementFunction& function) {
  // Scalars have no dimension to split, so Options::shard_placement does not see them.
  if (tensor.dim() == 0) {
    return Replicate{};
  }
  Placement placement = (function ? function(name, tensor) : std::nullopt).value_or(Shard{0});
  if (auto* shard = std::get_if<Shard>(&placement)) {
    // Makes negative dimensions positive. A dimension out of range stays unchanged, and shard_dim()
    // rejects it.
    shard->dim += shard->dim < 0 && shard->dim >= -tensor.dim() ? tensor.dim() : 0;
  }
  return placement;
}

DataMesh mesh_of(const std::string& name, const at::Tensor& tensor, const DataMesh& mesh,
                 const Options& options) {
  const std::optional<DeviceMesh> own =
      options.parameter_mesh ? options.parameter_mesh(name, tensor) : std::nullopt;
  return own ? DataMesh(*own) : mesh;
}

std::optional<std::int64_t> shard_dim(const std::string& name, const at::Tensor& tensor,
                                      const Placement& placement) {
  if (is_replicate(placement)) {
    return std::nullopt;
  }
  const auto* shard = std::get_if<Shard>(&placement);
  TESSERA_CHECK(shard != nullptr && shard->dim < tensor.dim() && shard->dim >= 0,
                "fully_shard: shard_placement returned ", to_string(placement), " for parameter '",
                name, "' of sizes ", tensor.sizes(),
                "; return Shard of one of its dimensions, Replicate() or nullopt");
  return shard->dim;
}

/// Throws Error unless `size` divides the number of ranks, because all meshes of neighbouring ranks
/// (Options::post_forward_mesh_size) must have `size` ranks.
void check_post_forward_mesh(const DataMesh& mesh, std::int64_t size) {
  TESSERA_CHECK(size >= 1 && mesh.shard.size() % size == 0,
                "fully_shard: post_forward_mesh_size = ", size, " does not divide the ",
                mesh.shard.size(), " ranks that shard; pass a divisor of that number");
}

/// Throws Error for a mixed-precision policy with an integer dtype.
void check_computes_in_floats(const MixedPrecisionPolicy& policy, const char* caller) {
  for (const auto& dtype : {policy.param_dtype, policy.reduce_dtype, policy.output_dtype}) {
    TESSERA_CHECK(!dtype || c10::isFloatingType(*dtype), caller, ": mp_policy sets ", *dtype,
                  ", but gradients need a floating-point type; set floating-point types only");
  }
}

ShardHome home_of(const DataMesh& mesh, const Options& options) {
  const c10::Device device = mesh.device();
  if (!options.offload_policy) {
    return {.device = device};
  }
  // Page-locked memory only helps copies to a GPU.
  return {.device = c10::kCPU,
          .pinned = options.offload_policy->pin_memory && !device.is_cpu(),
          .offloaded = true};
}

/// Throws Error if the tensor is already split on a dimension of `mesh`, because the joined mesh
/// would contain the dimension twice.
void check_not_split(const std::string& name, const nn::ParameterSlot& slot, const DataMesh& mesh) {
  const at::Tensor& tensor = slot.persistent();
  if (!tessera::is_distributed(tensor)) {
    return;
  }
  const DeviceMesh& known = sharding_spec(tensor).mesh;
  TESSERA_CHECK(!slot.has_persistent(), mesh.caller(), ": parameter '", name, "' is split over ",
                to_string(known), " already, by an outer FSDP unit; apply ", mesh.caller(),
                " to inner modules first");
  TESSERA_CHECK(known != mesh.all, mesh.caller(), ": parameter '", name, "' is split over ",
                to_string(known),
                " already, by parallelize_module or distribute_module; pass different dimensions "
                "of one mesh to the two calls, for example mesh[\"tp\"] and mesh[\"dp\"]");
}

const torch::nn::Module& adopted_or_own(const torch::nn::Module& module) {
  const auto* holder = dynamic_cast<const nn::detail::AdoptsModule*>(&module);
  return holder == nullptr ? module : holder->adopted_module();
}

bool makes_sparse_gradients(const torch::nn::Module& module) {
  const auto* embedding = module.as<torch::nn::Embedding>();
  const auto* bag = module.as<torch::nn::EmbeddingBag>();
  return (embedding != nullptr && embedding->options.sparse()) ||
         (bag != nullptr && bag->options.sparse());
}

/// Throws Error for a parameter with sparse gradients, because reductions split gradients by rows.
void refuse_sparse_gradients(const nn::NamedSlots& parameters, const char* caller) {
  for (const auto& [name, slot] : parameters) {
    for (const nn::ParameterSlot::Owner& owner : slot->owners()) {
      TESSERA_CHECK(!makes_sparse_gradients(adopted_or_own(*owner.module)), caller, ": parameter '",
                    name, "' of a ", owner.module->name(),
                    " gets sparse gradients, which FSDP cannot reduce over ranks; make the module "
                    "without sparse(true), or name the parameter in Options::ignored");
    }
  }
}

/// Whether `module` is a batch norm that computes batch statistics (in training, or without running
/// statistics).
template <class Norm>
bool is_batch_norm(const torch::nn::Module& module) {
  const auto* norm = module.as<Norm>();
  return norm != nullptr && (norm->is_training() || !norm->options.track_running_stats());
}

bool takes_batch_statistics(const torch::nn::Module& module) {
  const torch::nn::Module& own = adopted_or_own(module);
  return is_batch_norm<torch::nn::BatchNorm1d>(own) || is_batch_norm<torch::nn::BatchNorm2d>(own) ||
         is_batch_norm<torch::nn::BatchNorm3d>(own);
}

}  // namespace

nn::NamedSlots free_parameters(const std::vector<nn::ModuleBase*>& modules, const Options& options,
                               const char* caller) {
  nn::NamedSlots slots;
  std::unordered_set<const nn::ModuleBase*> inside;
  std::unordered_set<const nn::ParameterSlot*> seen;
  for (std::size_t i = 0; i < modules.size(); ++i) {
    modules[i]->named_slots();  // throws if a parameter has no nn::ParameterSlot
    // The modules of one unit can have parameters of the same name. The prefix distinguishes these
    // parameters in messages.
    const std::string prefix = modules.size() == 1 ? "" : std::to_string(i) + ".";
    const auto add = [&](const std::string& fqn, const nn::ModuleBase& module) {
      inside.insert(&module);
      for (const auto& [name, slot] : module.slots()) {
        if (seen.insert(slot.get()).second && !options.ignored.contains(slot)) {
          slots.emplace_back(prefix + nn::detail::join_fqn(fqn, name), slot);
        }
      }
    };
    nn::visit_modules(std::as_const(*modules[i]), add, outside_of_units());
  }
  // If a module outside of the unit shared the parameter, this module would compute with the shard.
  for (const auto& [name, slot] : slots) {
    for (const nn::ParameterSlot::Owner& owner : slot->owners()) {
      TESSERA_CHECK(inside.contains(owner.module), caller, ": parameter '", name,
                    "' is shared with a ", owner.module->name(),
                    " outside of this FSDP unit; apply ", caller,
                    " to the innermost module that contains both modules");
    }
  }
  return slots;
}

UnitSpec checked_spec(const std::vector<nn::ModuleBase*>& modules, const nn::NamedSlots& parameters,
                      const DataMesh& mesh, const Options& options) {
  check_computes_in_floats(options.mp_policy, mesh.caller());
  TESSERA_CHECK(options.bucket_cap_mb > 0, mesh.caller(),
                ": bucket_cap_mb = ", options.bucket_cap_mb,
                " is invalid; pass a positive number of MiB (default 25)");
  refuse_sparse_gradients(parameters, mesh.caller());
  UnitSpec spec{modules, mesh, options, {}};
  for (const auto& [name, slot] : parameters) {
    const at::Tensor& tensor = slot->persistent();
    const Placement placement = placement_of(name, tensor, options.shard_placement);
    const DataMesh own = mesh_of(name, tensor, mesh, options);
    check_post_forward_mesh(own, options.post_forward_mesh_size);
    check_not_split(name, *slot, own);
    const std::optional<std::int64_t> dim = shard_dim(name, slot->get(), placement);
    const std::string called =
        tessera::detail::concat("parameter '", name, "' of a unit of ", modules.front()->name());
    spec.parameters.push_back({.name = name,
                               .slot = slot,
                               .mesh = own,
                               .dim = dim,
                               .parts = parts_of(slot->get(), dim),
                               .sharding = sharded_spec(slot->get(), own, dim, called),
                               .home = home_of(own, options)});
  }
  return spec;
}

/// Only plain parameters are reduced in buckets. The gradient of a tensor-parallel parameter can
/// need another collective, in a different order on each rank.
bool reduces_in_buckets(const UnitSpec& spec) {
  return spec.mesh.replicas() > 1 && spec.mesh.shard.size() == 1 &&
         std::ranges::none_of(spec.parameters, [](const ParameterSpec& parameter) {
           return tessera::is_distributed(parameter.slot->get());
         });
}

namespace {

using Group = std::vector<ParameterSpec>;

bool may_share_group(const ParameterSpec& a, const ParameterSpec& b) {
  return a.slot->get().scalar_type() == b.slot->get().scalar_type() && a.mesh.all == b.mesh.all;
}

std::size_t bytes_of(const Group& group) {
  return std::accumulate(group.begin(), group.end(), std::size_t{0},
                         [](std::size_t sum, const ParameterSpec& parameter) {
                           return sum + parameter.slot->get().nbytes();
                         });
}

/// Returns the buckets in the order of their parameters. Filled from the last parameter, because
/// backward computes the last gradient first. A bucket has bucket_cap_mb MiB of parameters, the
/// first filled bucket 1 MiB, as in PyTorch's DDP.
std::vector<Group> buckets_of(const UnitSpec& spec) {
  const auto cap = static_cast<std::size_t>(spec.options.bucket_cap_mb) << 20U;
  constexpr std::size_t kFirstCap = std::size_t{1} << 20U;
  std::vector<Group> buckets;
  for (auto next = spec.parameters.rbegin(); next != spec.parameters.rend(); ++next) {
    const ParameterSpec& parameter = *next;
    // Each parameter dtype has its own buckets. Only the newest bucket of a dtype has room.
    const auto newest = std::find_if(buckets.rbegin(), buckets.rend(), [&](const Group& bucket) {
      return may_share_group(bucket.front(), parameter);
    });
    const bool is_first = newest != buckets.rend() && &*newest == &buckets.front();
    if (newest == buckets.rend() || bytes_of(*newest) >= (is_first ? kFirstCap : cap)) {
      buckets.push_back({parameter});
    } else {
      newest->push_back(parameter);
    }
  }
  std::ranges::for_each(buckets, [](Group& bucket) { std::ranges::reverse(bucket); });
  std::ranges::reverse(buckets);
  return buckets;
}

}  // namespace

std::vector<std::vector<ParameterSpec>> grouped(const UnitSpec& spec) {
  if (reduces_in_buckets(spec)) {
    return buckets_of(spec);
  }
  std::vector<Group> groups;
  for (const ParameterSpec& parameter : spec.parameters) {
    const auto group = std::ranges::find_if(
        groups, [&](const Group& known) { return may_share_group(known.front(), parameter); });
    if (group != groups.end()) {
      group->push_back(parameter);
    } else {
      groups.push_back({parameter});
    }
  }
  return groups;
}

void warn_of_batch_norm(const nn::ModuleBase& root, std::int64_t ranks) {
  std::string found;
  const auto note = [&](const std::string& fqn, const torch::nn::Module& module) {
    if (found.empty() && takes_batch_statistics(module)) {
      found = tessera::detail::concat(fqn.empty() ? "the unit itself" : "'" + fqn + "'", ", a ",
                                      module.name());
    }
  };
  nn::visit_modules(root, note, outside_of_units());
  if (ranks > 1 && !found.empty()) {
    TORCH_WARN(
        found,
        ", computes training statistics from this rank's part of the batch, and the running "
        "statistics differ between ranks: results depend on the number of ranks; use a norm over "
        "each sample (LayerNorm, RMSNorm, GroupNorm), or freeze the module with eval()");
  }
}

}  // namespace tessera::fsdp
