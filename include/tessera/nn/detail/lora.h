#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/dropout.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// The adapter that apply_lora() attaches to a Linear or GroupedLinear: y = x weight^T + bias +
/// scale * B(A(dropout(x))). The child modules have PEFT's names: lora_A.weight (rank, in),
/// lora_B.weight (out, rank). A GroupedLinear has one matrix for each expert.
template <class L>
struct LoraBranchOf {
  std::shared_ptr<L> a, b;
  double dropout = 0;
  double scale = 1;

  /// Returns dropout(x), with the seed of tessera::manual_seed (docs/random.md). Dropout is not a
  /// child module, because PEFT's parameter names have no such module.
  at::Tensor input(const at::Tensor& x, bool training) const {
    return training && dropout > 0 ? at::dropout(x, dropout, /*train=*/true) : x;
  }
};
using LoraBranch = LoraBranchOf<Linear>;

/// A Linear or a GroupedLinear, its FQN and its adapter (apply_lora). Without an adapter, `a` and
/// `b` are nullptr.
struct LoraLinear {
  std::string fqn;
  ModuleBase* module = nullptr;
  SlotPtr weight{}, a{}, b{};
  double dropout = 0;
  double scale = 1;
};
/// Returns the Linears and GroupedLinears below `module` that have an adapter (apply_lora), in
/// order of registration.
std::vector<LoraLinear> lora_linears(const ModuleBase& module);
/// Returns the adapters' parameters: "layers.0.attn.q_proj.lora_A.weight", ... load_hugging_face
/// and save_hugging_face skip these parameters, because a model's files do not contain adapters.
NamedSlots lora_slots(const ModuleBase& module);

}  // namespace tessera::nn
TESSERA_API_END
