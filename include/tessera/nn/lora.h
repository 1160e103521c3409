#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Options of LoRA, with PEFT's names and defaults.
struct LoraOptions {
  std::int64_t rank = 8;
  double alpha = 8;  ///< the term is multiplied by alpha / rank
  /// Patterns of the FQNs of Linears (see matches_fqn): {"layers.*.attn.[qv]_proj"}.
  std::vector<std::string> targets{};
  double dropout = 0;  ///< on the input of the term, in training
};

/// The adapter that apply_lora() attaches to a Linear: y = x weight^T + bias + scale *
/// B(A(dropout(x))). The matrices are modules below the Linear, with PEFT's names: lora_A.weight
/// (rank, in) and lora_B.weight (out, rank).
struct LoraBranch {
  std::shared_ptr<Linear> a, b;
  double dropout = 0;
  double scale = 1;

  /// B(A(dropout(x))), without the scale. Dropout draws from tessera::manual_seed (docs/random.md).
  at::Tensor term(const at::Tensor& x, bool training) const;
};

/// Low-rank adapters (Hu et al. 2021) of the Linears that the options name. Freezes all other
/// parameters of `module`. To be called before parallelize_module and fully_shard, which then shard
/// the adapters like their weights: for a column-wise Linear the rows of B are split and
/// A is replicated, for a row-wise Linear the columns of A are split and B is replicated.
///
/// init_weights fills A as Linear's weight (Kaiming-uniform) and B with zeros, whatever tables of
/// modules above say; init_unfilled() does so after the weights were loaded. An FSDP unit reduces
/// the gradients of its adapters only.
///
/// Not collective. Throws Error, before anything is changed, for a rank below 1, a dropout outside
/// [0, 1), a pattern that matches no Linear, and a Linear that has an adapter, a tied weight, or a
/// weight that is distributed already.
void apply_lora(ModuleBase& module, const LoraOptions& options);

/// A Linear with an adapter, and its FQN.
struct LoraLinear {
  std::string fqn;
  Linear* linear = nullptr;
  std::shared_ptr<LoraBranch> branch;
};
/// All of them below `module`, in its order.
std::vector<LoraLinear> lora_linears(const ModuleBase& module);
/// The parameters of the adapters: "layers.0.attn.q_proj.lora_A.weight", ... They are in no file of
/// the model: load_hugging_face and save_hugging_face leave them out.
NamedSlots lora_slots(const ModuleBase& module);

/// Adds scale * B A to the weight of each Linear that has an adapter and makes B zero: the model
/// computes what it did, outside of training, without the adapters. For save_hugging_face.
/// Collective where parameters are distributed: A and B are gathered on every rank, one Linear
/// after another. Throws Error for a model without adapters, for parameters without values, and
/// for weights that FSDP has gathered.
void merge_lora(ModuleBase& module);

}  // namespace tessera::nn
TESSERA_API_END
