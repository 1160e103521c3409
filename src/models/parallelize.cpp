#include "tessera/models/parallelize.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "tessera/core/error.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::models {
namespace {

using Modules = std::vector<nn::ModuleBase*>;

bool has_dim(const DeviceMesh& mesh, const std::string& name) {
  return std::ranges::find(mesh.shape().names(), name) != mesh.shape().names().end();
}

std::vector<std::string> present(const DeviceMesh& mesh, std::vector<std::string> dims) {
  std::erase_if(dims, [&](const std::string& name) { return !has_dim(mesh, name); });
  return dims;
}

/// Returns the mesh for FSDP: parameters are sharded over the dimensions `dims`, flattened to one
/// dimension. With HSDP, there is a first dimension, over which parameters are replicated.
DeviceMesh with_replicas(const DeviceMesh& mesh, const std::vector<std::string>& dims) {
  const DeviceMesh shard = mesh.slice(present(mesh, dims));
  const DeviceMesh flat = shard.ndim() == 1 ? shard : shard.flatten();
  return has_dim(mesh, "dp_replicate") ? DeviceMesh::concatenate({mesh["dp_replicate"], flat})
                                       : flat;
}

/// Returns the mesh for nn::apply_expert_parallel(): "tp" or, if "ep" has several ranks, ("ep",
/// "tp"). Then "ep" splits the experts, and the ranks along "tp" have different tokens.
DeviceMesh experts_mesh(const DeviceMesh& mesh) {
  if (!has_dim(mesh, "ep") || mesh.size("ep") == 1) {
    return mesh["tp"];
  }
  return mesh.size("tp") > 1 ? mesh[{"ep", "tp"}] : mesh["ep"];
}

/// Returns the FSDP options of a model's units. Parameters are sharded over "dp", "ep" and "cp".
/// Experts that are split over "ep" are sharded only over "dp" and "cp".
fsdp::Options unit_options(const DeviceMesh& mesh, fsdp::Options options) {
  const DeviceMesh over = experts_mesh(mesh), data = data_mesh(mesh);
  const std::int64_t ep = has_dim(mesh, "ep") ? mesh.size("ep") : 1;
  const std::int64_t parts = over.size(0), shards = data.size(data.ndim() - 1) / ep;
  if (ep > 1) {
    options.parameter_mesh = [over, own = with_replicas(mesh, {"dp", "cp"})](
                                 const std::string&, const at::Tensor& parameter) {
      const bool is_expert =
          tessera::is_distributed(parameter) && sharding_spec(parameter).mesh == over;
      return is_expert ? std::optional(own) : std::nullopt;
    };
  }
  // FSDP shards 3-D expert weights in dimension 0 (experts) if ranks get equally many experts,
  // otherwise in dimension 1 (features), so that no rank's shard is empty.
  options.shard_placement = [=, chosen_by = options.shard_placement](const std::string& name,
                                                                     const at::Tensor& parameter) {
    const auto chosen = chosen_by ? chosen_by(name, parameter) : std::nullopt;
    const bool whole =
        parameter.dim() != 3 || (parameter.size(0) + parts - 1) / parts % shards == 0;
    return chosen || whole ? chosen : std::optional<Placement>(Shard{1});
  };
  return options;
}

/// The activation-checkpointing policy of torchtitan: saves the outputs of attention and of the
/// first, third, fifth, ... matrix product (in a Llama block: queries, values and gate).
bool keep_every_other_matmul(const nn::OperatorCall& call) {
  static const nn::OperatorPolicy costly = nn::save_matmuls_and_attention();
  const bool is_product = call.name == "aten::mm" || call.name == "tessera::fp8_linear" ||
                          call.name == "tessera::grouped_linear";
  const bool other = is_product && call.index % 2 == 1;
  return !other && costly(call);
}

/// Applies activation checkpointing to the first `recomputed_blocks` blocks; by default to all.
void checkpoint_blocks(nn::ModuleBase& model, Modules blocks, const ParallelOptions& options) {
  if (options.activations == ActivationMemory::kAll || options.recomputed_blocks == 0) {
    return;
  }
  blocks.resize(static_cast<std::size_t>(options.recomputed_blocks.value_or(std::ssize(blocks))));
  nn::CheckpointOptions checkpoint;
  if (options.activations == ActivationMemory::kMatmuls) {
    checkpoint.policy = keep_every_other_matmul;
  }
  const auto is_recomputed = [&](const std::string&, const nn::ModuleBase& module) {
    return std::ranges::find(blocks, &module) != blocks.end();
  };
  nn::apply_activation_checkpointing(model, is_recomputed, checkpoint);
}

/// Returns how many FSDP units, counted from the first, are resharded after forward. The default
/// excludes the last block and later units, because backward needs these units first.
std::ptrdiff_t count_resharded(const std::vector<Modules>& units, const Modules& blocks,
                               const ParallelOptions& options) {
  if (!options.fsdp.reshard_after_forward.value_or(true)) {
    return 0;
  }
  const auto is_last_block = [&](const Modules& unit) {
    return !blocks.empty() && std::ranges::find(unit, blocks.back()) != unit.end();
  };
  return options.reshard_last ? std::ssize(units)
                              : std::ranges::find_if(units, is_last_block) - units.begin();
}

void shard_units(const std::vector<Modules>& units, const Modules& blocks, const DeviceMesh& mesh,
                 const ParallelOptions& options) {
  const std::ptrdiff_t resharded = count_resharded(units, blocks, options);
  // The last unit is the whole model. fully_shard() gives that unit the parameters that are in no
  // earlier unit.
  for (std::ptrdiff_t i = 0; i < std::ssize(units); ++i) {
    const Modules& modules = units[static_cast<std::size_t>(i)];
    fsdp::Options unit = options.fsdp;
    unit.reshard_after_forward = i < resharded;
    fsdp::fully_shard(modules, mesh, unit);
    const auto is_embedding = [](const nn::ModuleBase* module) {
      return dynamic_cast<const nn::Embedding*>(module) != nullptr;
    };
    if (std::ranges::all_of(modules, is_embedding)) {
      // The embedding's FSDP unit is not all-gathered for backward, because the gradient of a
      // look-up does not need the embedding's weights.
      fsdp::set_unshard_in_backward(*modules.front(), false);
    }
  }
}

}  // namespace

void DeclaresUnits::set_context_parallel(const DeviceMesh& mesh) {
  fail("the mesh has context parallelism over ", mesh.size(),
       " ranks, but this model does not support context parallelism; use a mesh without \"cp\"");
}

DeviceMesh batch_mesh(const DeviceMesh& mesh) {
  return mesh.slice(present(mesh, {"dp_replicate", "dp", "ep"}));
}

DeviceMesh data_mesh(const DeviceMesh& mesh) {
  return with_replicas(mesh, {"dp", "ep", "cp"});
}

namespace {

void split_model(nn::ModuleBase& model, const DeviceMesh& tp, const DeviceMesh& experts,
                 const ParallelOptions& options) {
  const tensor_parallel::DeclaredPlanOptions declared{
      .sequence_parallel = options.sequence_parallel,
      .loss_parallel = options.loss_parallel,
      .regather = options.regather};
  if (tp.size() > 1) {
    tensor_parallel::parallelize_module(model, tp,
                                        tensor_parallel::declared_plan(model, tp, declared));
  }
  if (experts.size() > 1) {
    const std::int64_t mixtures = nn::apply_expert_parallel(model, experts);
    TESSERA_CHECK(mixtures > 0 || experts == tp, "the mesh has expert parallelism over ",
                  experts.size(0), " ranks, but a ", model.name(),
                  " has no experts; use a mesh without \"ep\"");
  }
}

}  // namespace

void apply_tensor_parallel(nn::ModuleBase& model, const DeviceMesh& mesh,
                           const ParallelOptions& options) {
  split_model(model, mesh, mesh, options);
}

void parallelize(nn::ModuleBase& model, const DeviceMesh& mesh, const ParallelOptions& options) {
  auto* declared = dynamic_cast<DeclaresUnits*>(&model);
  TESSERA_CHECK(declared != nullptr, "a ", model.name(),
                " was passed to parallelize(), but is not derived from models::DeclaresUnits; "
                "derive the model from this class, or call parallelize_module and fully_shard");
  const Modules blocks = declared->blocks();
  const std::int64_t recomputed = options.recomputed_blocks.value_or(0);
  TESSERA_CHECK(recomputed >= 0 && recomputed <= std::ssize(blocks), "recomputed_blocks is ",
                recomputed, ", but the model has ", blocks.size(),
                " blocks; pass a number from 0 to the number of blocks");
  // Tensor parallelism comes before FSDP, so that FSDP shards each rank's part of a parameter.
  split_model(model, mesh["tp"], experts_mesh(mesh), options);
  if (has_dim(mesh, "cp")) {
    declared->set_context_parallel(mesh["cp"]);
  }
  ParallelOptions own = options;
  own.fsdp = unit_options(mesh, options.fsdp);
  checkpoint_blocks(model, blocks, options);
  shard_units(declared->fsdp_units(), blocks, data_mesh(mesh), own);
}

}  // namespace tessera::models
