#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

#include "tessera/export.h"
#include "tessera/internals/detail/engine.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/tensor_wrapper.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Stands in `.grad` of a parameter whose gradient cannot be read. Every operator on it throws
/// Error with the reason, except those that run() implements.
class PlaceholderGradient : public tessera::detail::PlaceholderTensor {
 public:
  using PlaceholderTensor::PlaceholderTensor;
  /// Runs an operator whose first argument this is: true if it did.
  virtual bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack);
};

/// `gradient` as one of them, or nullptr.
PlaceholderGradient* placeholder(const at::Tensor& gradient);

using tessera::detail::BackwardCall;
using tessera::detail::RunBackward;

/// The gradient node of a persistent parameter (a shard) while forward uses another tensor (the
/// unsharded one). In a graph of the parameter itself autograd uses libtorch's own node.
class StandInGradient : public tessera::detail::LeafNode {
 public:
  using tessera::detail::LeafNode::LeafNode;
  /// Executes `call`, whose outputs include this node, by calls of libtorch's engine, `run`.
  virtual tessera::detail::variable_list execute(const BackwardCall& call,
                                                 const RunBackward& run) = 0;
};

/// Makes autograd's engine use stand-ins; once for the process. Does nothing if another engine has
/// replaced libtorch's already, as Python's does: there they are tensors outside of any graph.
void ask_stand_ins();

/// Marks a tensor that `by` ("fully_shard") has replaced in its slot. A stock torch::optim
/// optimizer that was made earlier still holds it, and would update values that are not used. So
/// its gradient becomes a tensor that every operator refuses: step() and zero_grad() of such an
/// optimizer throw Error with the reason. The values can still be read. libtorch's hooks of
/// `replaced` (register_hook, post-accumulate) become those of `replacement`, the leaf that is in
/// the slot now.
void retire_parameter(const at::Tensor& replaced, const at::Tensor& replacement,
                      const std::string& by);

}  // namespace tessera::nn
TESSERA_API_END
