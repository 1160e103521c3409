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

/// The interface to the state of parameters that FSDP stores outside of the slots. FSDP attaches a
/// SlotKeeper to each module that owns such slots.
class SlotKeeper {
 public:
  virtual ~SlotKeeper() = default;
  /// Whether `tensor` is the unsharded parameter, even while the slot has the shard.
  virtual bool is_unsharded(const ParameterSlot& slot, const at::Tensor& tensor) const = 0;
  /// Whether this rank's local gradient, before the last reduction, is known to be non-finite.
  /// Waits for the device.
  virtual bool brought_nonfinite(const ParameterSlot& slot) const = 0;
};

/// Clears the gradient of the parameter in `slot`, and the gradient that FSDP saves for a later
/// reduction.
void drop_gradient(const ParameterSlot& slot);
/// Whether forward uses, or has used, `tensor` as the parameter in `slot`.
bool is_computed_with(const ParameterSlot& slot, const at::Tensor& tensor);
/// Sets whether the parameter in `slot` is trainable.
void set_trainable(ParameterSlot& slot, bool trainable);
/// SlotKeeper::brought_nonfinite() for the parameter in `slot`.
bool brought_nonfinite(const ParameterSlot& slot);

}  // namespace tessera::nn

namespace tessera::nn::detail {

/// The parameters below `module` whose FQN matches one of the patterns (matches_fqn). A tied
/// parameter matches if any of its FQNs matches. Throws Error for a pattern that matches nothing.
/// `caller`: the function's name in messages.
std::unordered_set<SlotPtr> matched_slots(const ModuleBase& module,
                                          const std::vector<std::string>& patterns,
                                          const char* caller);

}  // namespace tessera::nn::detail
TESSERA_API_END
