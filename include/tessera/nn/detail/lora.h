#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// The adapter that apply_lora() attaches to a Linear: y = x weight^T + bias + scale *
/// B(A(dropout(x))). The matrices are child modules of the Linear, with PEFT's names: lora_A.weight
/// (rank, in) and lora_B.weight (out, rank).
struct LoraBranch {
  std::shared_ptr<Linear> a, b;
  double dropout = 0;
  double scale = 1;

  /// Returns B(A(dropout(x))), without the scale. Dropout uses the seed of tessera::manual_seed
  /// (docs/random.md).
  at::Tensor term(const at::Tensor& x, bool training) const;
};

/// A Linear with an adapter (apply_lora), and the FQN of the Linear.
struct LoraLinear {
  std::string fqn;
  Linear* linear = nullptr;
  std::shared_ptr<LoraBranch> branch;
};
/// Returns all Linears with an adapter (apply_lora) below `module`, in order of registration.
std::vector<LoraLinear> lora_linears(const ModuleBase& module);
/// Returns the adapters' parameters: "layers.0.attn.q_proj.lora_A.weight", ... load_hugging_face
/// and save_hugging_face skip these parameters, because a model's files do not contain them.
NamedSlots lora_slots(const ModuleBase& module);

}  // namespace tessera::nn
TESSERA_API_END
