#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

#include "tessera/export.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/tensor_wrapper.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// A tensor in `.grad` of a parameter whose gradient cannot be read. Every operator on the
/// placeholder throws Error with the reason, except the operators that run() implements.
class PlaceholderGradient : public tessera::detail::PlaceholderTensor {
 public:
  using PlaceholderTensor::PlaceholderTensor;
  /// Runs an operator whose first argument is this placeholder. Returns false if the operator is
  /// not implemented.
  virtual bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack);
};

/// `gradient` as a PlaceholderGradient, or nullptr.
PlaceholderGradient* placeholder(const at::Tensor& gradient);

using tessera::detail::BackwardCall;
using tessera::detail::RunBackward;

/// The gradient node of a persistent parameter (an FSDP shard) while forward uses another tensor
/// (the unsharded parameter). If a graph uses the shard itself, autograd uses libtorch's own node.
class StandInGradient : public tessera::detail::LeafNode {
 public:
  using tessera::detail::LeafNode::LeafNode;
  /// Runs the backward call `call`, whose outputs include this node. `run` calls libtorch's engine.
  virtual tessera::detail::variable_list execute(const BackwardCall& call,
                                                 const RunBackward& run) = 0;
};

/// Makes autograd's engine use StandInGradient nodes. Only the first call in a process has an
/// effect. Does nothing if another engine, such as Python's, has already replaced libtorch's
/// engine: with such an engine no graph contains the shards.
void ask_stand_ins();

/// Marks a tensor that `by` ("fully_shard") has replaced in its slot. A stock torch::optim
/// optimizer that was made earlier still has the old tensor and would update unused values.
/// Therefore the old tensor's gradient becomes a placeholder that every operator refuses: step()
/// and zero_grad() of such an optimizer throw Error with the reason. The values can still be read.
/// libtorch's hooks of `replaced` (register_hook, post-accumulate) move to `replacement`, the leaf
/// that is now in the slot.
void retire_parameter(const at::Tensor& replaced, const at::Tensor& replacement,
                      const std::string& by);

}  // namespace tessera::nn
TESSERA_API_END
