#include "tessera/models/parallelize.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "tessera/core/error.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::models {
namespace {

using Modules = std::vector<nn::ModuleBase*>;

bool has_dim(const DeviceMesh& mesh, const char* name) {
  return std::ranges::find(mesh.shape().names(), name) != mesh.shape().names().end();
}

/// A checkpointing policy: saves the results of attention and of every other matrix product, as
/// torchtitan does. In a Llama block, saves the products of the queries, the values and the gate.
bool keep_every_other_matmul(const nn::OperatorCall& call) {
  static const nn::OperatorPolicy costly = nn::save_matmuls_and_attention();
  const bool is_product = call.name == "aten::mm" || call.name == "tessera::fp8_linear";
  const bool other = is_product && call.index % 2 == 1;
  return !other && costly(call);
}

/// Applies activation checkpointing to the blocks of a model, which are also FSDP units.
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

/// The number of FSDP units, counted from the first, that are resharded after forward. By default
/// the last block and the units after it are not resharded, because backward would gather these
/// units again immediately.
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
  // The model is the last FSDP unit: a unit takes all parameters below its modules, except those of
  // earlier units.
  for (std::ptrdiff_t i = 0; i < std::ssize(units); ++i) {
    const Modules& modules = units[static_cast<std::size_t>(i)];
    fsdp::Options unit = options.fsdp;
    unit.reshard_after_forward = i < resharded;
    fsdp::fully_shard(modules, mesh, unit);
    const auto is_embedding = [](const nn::ModuleBase* module) {
      return dynamic_cast<const nn::Embedding*>(module) != nullptr;
    };
    if (std::ranges::all_of(modules, is_embedding)) {
      // The FSDP unit of the embedding is not gathered in backward, because the gradient of an
      // embedding look-up does not need the table.
      fsdp::set_unshard_in_backward(*modules.front(), false);
    }
  }
}

}  // namespace

void DeclaresUnits::set_context_parallel(const DeviceMesh& mesh) {
  fail("context parallelism over ", mesh.size(),
       " ranks was asked for, which this model does not have; take a mesh without \"cp\"");
}

DeviceMesh batch_mesh(const DeviceMesh& mesh) {
  return has_dim(mesh, "dp_replicate") ? mesh[{"dp_replicate", "dp"}] : mesh["dp"];
}

/// Returns the mesh for FSDP. HSDP needs a 2-D mesh: parameters are replicated over the first
/// dimension and sharded over the second.
DeviceMesh data_mesh(const DeviceMesh& mesh) {
  if (!has_dim(mesh, "cp")) {
    return batch_mesh(mesh);
  }
  const DeviceMesh shard = mesh[{"dp", "cp"}].flatten();
  return has_dim(mesh, "dp_replicate") ? mesh[{"dp_replicate", "dp_cp"}] : shard;
}

void apply_tensor_parallel(nn::ModuleBase& model, const DeviceMesh& mesh,
                           const ParallelOptions& options) {
  const tensor_parallel::DeclaredPlanOptions declared{
      .sequence_parallel = options.sequence_parallel,
      .loss_parallel = options.loss_parallel,
      .regather = options.regather};
  if (mesh.size() > 1) {
    tensor_parallel::parallelize_module(model, mesh,
                                        tensor_parallel::declared_plan(model, mesh, declared));
  }
}

void parallelize(nn::ModuleBase& model, const DeviceMesh& mesh, const ParallelOptions& options) {
  auto* declared = dynamic_cast<DeclaresUnits*>(&model);
  TESSERA_CHECK(declared != nullptr, "a ", model.name(),
                " was given to parallelize(), but it declares no units; derive it from "
                "models::DeclaresUnits, or apply parallelize_module and fully_shard to it");
  const Modules blocks = declared->blocks();
  const std::int64_t recomputed = options.recomputed_blocks.value_or(0);
  TESSERA_CHECK(recomputed >= 0 && recomputed <= std::ssize(blocks), "activation checkpointing of ",
                recomputed, " blocks was asked for, but the model has ", blocks.size(),
                "; give at most as many");
  // Tensor parallelism is applied before FSDP, so that FSDP shards each rank's part.
  apply_tensor_parallel(model, mesh["tp"], options);
  if (has_dim(mesh, "cp")) {
    declared->set_context_parallel(mesh["cp"]);
  }
  checkpoint_blocks(model, blocks, options);
  shard_units(declared->fsdp_units(), blocks, data_mesh(mesh), options);
}

}  // namespace tessera::models
