#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_set>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/module.h"
#include "tessera/nn/parameter.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// What FSDP keeps of parameters outside of their slots. The keeper attaches itself, as a
/// SlotKeeper, to the modules that own the slots.
class SlotKeeper {
 public:
  virtual ~SlotKeeper() = default;
  /// Whether `tensor` is the unsharded parameter, also while the slot has the shard.
  virtual bool is_unsharded(const ParameterSlot& slot, const at::Tensor& tensor) const = 0;
  /// Whether this rank's gradient of the parameter before the last reduction is known not to be
  /// finite. Waits for the device.
  virtual bool brought_nonfinite(const ParameterSlot& slot) const = 0;
};

/// Drops the gradient of the parameter in `slot`, with what FSDP keeps in it for a later reduction.
void drop_gradient(const ParameterSlot& slot);
/// Whether forward uses, or has used, `tensor` as the parameter in `slot`.
bool is_computed_with(const ParameterSlot& slot, const at::Tensor& tensor);
/// SlotKeeper::brought_nonfinite() for the parameter in `slot`.
bool brought_nonfinite(const ParameterSlot& slot);

}  // namespace tessera::nn

namespace tessera::nn::detail {

/// The parameters below `module` with an FQN that matches one of the patterns (matches_fqn): a tied
/// one by any of its FQNs. Throws Error for a pattern that matches none. `caller`: the name in
/// messages.
std::unordered_set<SlotPtr> matched_slots(const ModuleBase& module,
                                          const std::vector<std::string>& patterns,
                                          const char* caller);

}  // namespace tessera::nn::detail
TESSERA_API_END
