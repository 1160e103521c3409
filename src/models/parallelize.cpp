// The plan is the usual one of Megatron and torchtitan: column-wise into each half of a block,
// row-wise out of it, so that a half costs one gather and one reduce-scatter with sequence
// parallelism, or one all-reduce without.

#include "tessera/models/parallelize.h"

#include <algorithm>
#include <string>
#include <vector>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/activation_checkpointing.h"
#include "tessera/tensor_parallel/block_plans.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::models {

using namespace tensor_parallel;

tensor_parallel::ParallelizePlan Llama::tensor_parallel_plan(
    const DeviceMesh& mesh, const DeclaredPlanOptions& options) const {
  const LlamaConfig& config = config_;
  check_tensor_parallel(config, mesh.size());
  // Activations are folded to (tokens, hidden): the sequence dimension is 0. Between the halves of
  // a block they are sharded on it, or replicated without sequence parallelism.
  const Placement between = options.sequence_parallel ? Placement(Shard{0}) : Replicate{};
  const StylePtr norm =
      options.sequence_parallel ? sequence_parallel({.sequence_dim = 0}) : replicate_parallel();
  const BlockPlanOptions block{.activations = between,
                               .regather = options.regather,
                               .replicate_kv_heads = key_value_copies(config, mesh.size()) > 1};
  const Placement logits = options.loss_parallel ? Placement(Shard{-1}) : Replicate{};
  const std::string layer = "model.layers.*.";
  return joined({embedding_plan("model.embed_tokens", {.activations = between}),
                 {{layer + "input_layernorm", norm},
                  {layer + "post_attention_layernorm", norm},
                  {"model.norm", norm},
                  {"lm_head", colwise_parallel({.output_layouts = logits,
                                                .use_local_output = !options.loss_parallel,
                                                .regather = options.regather})}},
                 attention_plan(layer + "self_attn", attention_options(config), block),
                 swi_glu_plan(layer + "mlp", {}, block)});
}

namespace {

bool has_dim(const DeviceMesh& mesh, const char* name) {
  return std::ranges::find(mesh.shape().names(), name) != mesh.shape().names().end();
}

}  // namespace

DeviceMesh batch_mesh(const DeviceMesh& mesh) {
  return has_dim(mesh, "dp_replicate") ? mesh[{"dp_replicate", "dp"}] : mesh["dp"];
}

/// HSDP takes a mesh of two dimensions: replicate over the first, shard over the second.
DeviceMesh data_mesh(const DeviceMesh& mesh) {
  if (!has_dim(mesh, "cp")) {
    return batch_mesh(mesh);
  }
  const DeviceMesh shard = mesh[{"dp", "cp"}].flatten();
  return has_dim(mesh, "dp_replicate") ? mesh[{"dp_replicate", "dp_cp"}] : shard;
}

namespace {

/// Keeps what attention and every other matrix multiplication return: of a block, the queries, the
/// values and the gate. torchtitan's choice.
nn::SavePolicy keep_every_other_matmul(const nn::OperatorCall& call) {
  static const nn::OperatorPolicy costly = nn::save_matmuls_and_attention();
  const bool other = call.name == "aten::mm" && call.index % 2 == 1;
  return other ? nn::SavePolicy::kPreferRecompute : costly(call);
}

/// A block is the unit of both: what is recomputed is what FSDP gathers at once.
void checkpoint_blocks(Llama& model, ActivationMemory activations) {
  if (activations == ActivationMemory::kAll) {
    return;
  }
  nn::CheckpointOptions options;
  if (activations == ActivationMemory::kMatmuls) {
    options.policy = keep_every_other_matmul;
  }
  nn::apply_activation_checkpointing(model,
                                     {.select = nn::of_class<LlamaBlock>(), .options = options});
}

/// Tied, embedding and head are one parameter, and belong to the model's unit.
bool has_unit_of_head(const Llama& model) {
  return !model.config().tie_word_embeddings;
}

DeclaredPlanOptions declared_options(const ParallelOptions& options) {
  return {.sequence_parallel = options.sequence_parallel,
          .loss_parallel = options.loss_parallel,
          .regather = options.regather && options.activations == ActivationMemory::kAll};
}

/// What comes after tensor parallelism.
void parallelize_data(Llama& model, const DeviceMesh& mesh, const ParallelOptions& options) {
  if (has_dim(mesh, "cp")) {
    model.set_context_parallel(mesh["cp"]);
  }
  checkpoint_blocks(model, options.activations);
  const bool reshard = options.fsdp.reshard_after_forward.value_or(true);
  // The model last: a unit takes the parameters below it that no other unit has.
  const auto units = model.fsdp_units();
  // What backward needs first would be gathered again at once: the last block, and all after it.
  const std::size_t kept = has_unit_of_head(model) ? 3 : 2;
  const std::size_t resharded = units.size() - (options.reshard_last ? 0 : kept);
  for (std::size_t i = 0; i < units.size(); ++i) {
    fsdp::Options unit = options.fsdp;
    unit.reshard_after_forward = reshard && i < resharded;
    fsdp::fully_shard(units[i], data_mesh(mesh), unit);
  }
  if (has_unit_of_head(model)) {
    // The gradient of a look-up needs no table.
    fsdp::set_unshard_in_backward(*units.front().front(), false);
  }
}

}  // namespace

void apply_tensor_parallel(Llama& model, const DeviceMesh& mesh, const ParallelOptions& options) {
  const ParallelizePlan plan =
      mesh.size() > 1 ? declared_plan(model, mesh, declared_options(options)) : ParallelizePlan{};
  if (options.apply_plan) {
    options.apply_plan(model, mesh, plan);
  } else if (mesh.size() > 1) {
    parallelize_module(model, mesh, plan);
  }
}

void parallelize(Llama& model, const DeviceMesh& mesh, const ParallelOptions& options) {
  // Tensor parallelism first: FSDP then shards what it has left of each parameter.
  apply_tensor_parallel(model, mesh["tp"], options);
  parallelize_data(model, mesh, options);
}

}  // namespace tessera::models
