#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

#include "tessera/export.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/tensor_wrapper.h"
#include "tessera/nn/module.h"
#include "tessera/nn/parameter.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// FSDP attaches a GradientRecord to each module whose parameters FSDP shards. Modules use the
/// GradientRecord to ask FSDP about gradients.
struct GradientRecord {
  /// Returns true if this rank's gradient of the parameter had NaN or infinite values before the
  /// last reduction with other ranks; false also if unknown. Waits for the device.
  std::function<bool(const ParameterSlot& slot)> brought_nonfinite;
};

/// Returns a text for messages: "parameter 'layers.0.up.weight'", or "a parameter of sizes [8, 4]"
/// before the FQN is known.
std::string describe(const ParameterSlot& slot);
/// Returns the first three of `names` as text: "'a', 'b', 'c', ...".
std::string first_of(const std::vector<std::string>& names);
/// Clears the gradients of the parameter in `slot`: of the shard and of the unsharded parameter.
void drop_gradient(const ParameterSlot& slot);
void set_trainable(ParameterSlot& slot, bool trainable);
/// Calls GradientRecord::brought_nonfinite() for `slot`. Returns false for parameters without FSDP.
bool brought_nonfinite(const ParameterSlot& slot);

/// A placeholder in `.grad` of a parameter whose gradient cannot be read. Every operator on the
/// placeholder throws Error with the reason, except the operators that run() implements.
class PlaceholderGradient : public tessera::detail::PlaceholderTensor {
 public:
  using PlaceholderTensor::PlaceholderTensor;
  /// Runs an operator whose first argument is the placeholder. Returns false for all operators that
  /// must throw Error.
  virtual bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack);
};

/// Returns `gradient` as a PlaceholderGradient, or nullptr if `gradient` has another class.
PlaceholderGradient* placeholder(const at::Tensor& gradient);

using tessera::detail::BackwardCall;
using tessera::detail::RunBackward;

/// The autograd node that replaces AccumulateGrad for an FSDP shard while forward uses the
/// unsharded parameter. If an autograd graph has the shard itself, AccumulateGrad is used.
class StandInGradient : public tessera::detail::LeafNode {
 public:
  using tessera::detail::LeafNode::LeafNode;
  /// Runs a backward call that computes the gradient of this node. `run` calls libtorch's engine.
  virtual tessera::detail::variable_list execute(const BackwardCall& call,
                                                 const RunBackward& run) = 0;
};

/// Makes autograd's engine use StandInGradient nodes. Does nothing if another engine, such as
/// Python's, has replaced libtorch's: torch::autograd::grad() then cannot compute gradients of
/// FSDP's shards.
void ask_stand_ins();

/// Marks a parameter tensor that the function `by` ("fully_shard") has replaced. The tensor's
/// gradient becomes a placeholder. An optimizer that still has the tensor then throws Error in
/// step() and zero_grad(). Hooks on `replaced` move to `replacement`, the new parameter tensor.
void retire_parameter(const at::Tensor& replaced, const at::Tensor& replacement,
                      const std::string& by);

/// Like check_initialized(). `remedy`: the advice at the end of the message.
void check_filled(const ModuleBase& module, const std::string& caller, const std::string& remedy);

/// Throws Error if libtorch's register_buffer has registered a buffer on the meta device, because
/// such a buffer cannot be replaced. `caller`: function name for the message.
void refuse_meta_buffers(const ModuleBase& module, const std::string& caller);

}  // namespace tessera::nn

namespace tessera::nn::detail {

/// Returns the parameters below `module` with an FQN that matches a pattern (matches_fqn). A tied
/// parameter has several FQNs. Throws Error for a pattern that matches nothing. `caller`: function
/// name for messages.
std::unordered_set<SlotPtr> matched_slots(const ModuleBase& module,
                                          const std::vector<std::string>& patterns,
                                          const char* caller);

/// Returns a counter that increases when a parameter gets uninitialized storage. If the counter has
/// increased, the next call of each module checks its parameters again.
std::uint64_t fill_epoch();

}  // namespace tessera::nn::detail
TESSERA_API_END
