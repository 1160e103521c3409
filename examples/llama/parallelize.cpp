#include "examples/llama/parallelize.h"

#include <algorithm>
#include <string>
#include <vector>

namespace llama {

using namespace tessera;
using namespace tessera::tensor_parallel;

tensor_parallel::Plan tensor_parallel_plan(const ParallelOptions& options) {
  // Activations are folded to (tokens, hidden): the sequence dimension is 0. Between the halves of
  // a block they are sharded on it, or replicated without sequence parallelism.
  const Placement between = options.sequence_parallel ? Placement(Shard{0}) : Replicate{};
  const StylePtr norm =
      options.sequence_parallel ? sequence_parallel({.sequence_dim = 0}) : replicate_parallel();
  // One gather that q, k, v (or gate, up) share.
  const StylePtr gather =
      prepare_module_input({.input = {between}, .desired_input = {Replicate{}}});
  // Heads divide tp, so attention computes on plain local tensors; the MLP's width may not.
  const StylePtr heads = colwise_parallel({});
  const StylePtr width = colwise_parallel({.use_local_output = false});
  const StylePtr back = rowwise_parallel({.output = between, .use_local_output = false});
  const Placement logits = options.loss_parallel ? Placement(Shard{-1}) : Replicate{};
  return {
      {"model.embed_tokens",
       rowwise_parallel({.input = Replicate{}, .output = between, .use_local_output = false})},
      {"model.layers.*.input_layernorm", norm},
      {"model.layers.*.self_attn", gather},
      {"model.layers.*.self_attn.q_proj", heads},
      {"model.layers.*.self_attn.k_proj", heads},
      {"model.layers.*.self_attn.v_proj", heads},
      {"model.layers.*.self_attn.o_proj", back},
      {"model.layers.*.post_attention_layernorm", norm},
      {"model.layers.*.mlp", gather},
      {"model.layers.*.mlp.gate_proj", width},
      {"model.layers.*.mlp.up_proj", width},
      {"model.layers.*.mlp.down_proj", back},
      {"model.norm", norm},
      {"lm_head",
       colwise_parallel(
           {.input = between, .output = logits, .use_local_output = !options.loss_parallel})},
  };
}

DeviceMesh data_mesh(const DeviceMesh& mesh) {
  const std::vector<std::string>& names = mesh.shape().names();
  const bool replicated = std::ranges::find(names, "dp_replicate") != names.end();
  return replicated ? mesh[{"dp_replicate", "dp"}] : mesh["dp"];
}

namespace {

/// Keeps what attention and every other matrix multiplication return: of a block, the queries, the
/// values and the gate. torchtitan's choice.
nn::SavePolicy keep_every_other_matmul(const nn::OperatorCall& call) {
  static const nn::OperatorPolicy costly = nn::save_matmuls_and_attention();
  const bool other = call.name == "aten::mm" && call.index % 2 == 1;
  return other ? nn::SavePolicy::kPreferRecompute : costly(call);
}

void checkpoint_blocks(Llama& model, ActivationMemory activations) {
  if (activations == ActivationMemory::kAll) return;
  nn::CheckpointOptions options;
  if (activations == ActivationMemory::kMatmuls) options.policy = keep_every_other_matmul;
  nn::apply_activation_checkpointing(model, {.select = nn::of_class<Block>(), .options = options});
}

}  // namespace

void parallelize(Llama& model, const DeviceMesh& mesh, const ParallelOptions& options) {
  if (mesh.size("tp") > 1) {
    check_tensor_parallel(model.config(), mesh.size("tp"));
    parallelize_module(model, mesh["tp"], tensor_parallel_plan(options));
  }
  checkpoint_blocks(model, options.activations);
  const bool reshard = options.fsdp.reshard_after_forward.value_or(true);
  const std::vector<nn::ModuleBase*> units = model.fsdp_units();
  for (std::size_t i = 0; i < units.size(); ++i) {
    // The last block's parameters would be gathered again at once in backward.
    const bool last = i + 2 >= units.size();
    fsdp::Options unit = options.fsdp;
    unit.reshard_after_forward = reshard && !last;
    fsdp::fully_shard(*units[i], data_mesh(mesh), unit);
  }
}

}  // namespace llama
