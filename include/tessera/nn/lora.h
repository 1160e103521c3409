#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Options of LoRA. Names and defaults are PEFT's.
struct LoraOptions {
  std::int64_t rank = 8;
  double alpha = 8;  ///< scale of the adapter's term: the term is multiplied by alpha / rank
  /// FQN patterns of the Linears that get an adapter (see matches_fqn):
  /// {"layers.*.attn.[qv]_proj"}.
  std::vector<std::string> targets{};
  double dropout = 0;  ///< dropout probability on the input of the adapter's term, in training only
};

/// Adds low-rank adapters (Hu et al. 2021) to the Linears that match `options.targets`: y = x
/// weight^T + bias + alpha / rank * B(A(dropout(x))). A and B are child modules of the Linear, with
/// PEFT's names: lora_A.weight (rank, in) and lora_B.weight (out, rank). Freezes all other
/// parameters of `module`. Call apply_lora() before parallelize_module and fully_shard, which then
/// shard the adapters like the weights: for a column-wise Linear the rows of B are split and A is
/// replicated, for a row-wise Linear the columns of A are split and B is replicated.
///
/// init_weights fills A like a Linear's weight (Kaiming-uniform) and B with zeros; initialiser
/// tables of parent modules do not apply. After the weights have been loaded, init_unfilled() fills
/// A and B in this way. An FSDP unit reduces only the adapters' gradients.
///
/// Not collective. Throws Error, before anything is changed, for a rank below 1, a dropout outside
/// [0, 1), a pattern that matches no Linear, and a Linear that already has an adapter, has a tied
/// weight, or has a weight that is already distributed.
void apply_lora(ModuleBase& module, const LoraOptions& options);

/// Adds scale * B A to the weight of each Linear with an adapter, and sets B to zero. Outside of
/// training the model's results do not change. Call merge_lora() before save_hugging_face.
/// Collective if parameters are distributed: A and B are gathered on every rank, one Linear after
/// another. Throws Error for a model without adapters, for parameters without values, and for
/// weights that FSDP has gathered.
void merge_lora(ModuleBase& module);

}  // namespace tessera::nn
TESSERA_API_END
