#pragma once

#include "tessera/internals/detail/engine.h"
#include "tessera/internals/detail/graph.h"

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

using tessera::detail::BackwardCall;
using tessera::detail::RunBackward;

/// Where autograd looks for the gradient of a parameter that persists while another tensor stands
/// in for it in forward. In a graph of the parameter itself it is libtorch's own node.
class StandInGradient : public tessera::detail::LeafNode {
 public:
  using tessera::detail::LeafNode::LeafNode;
  /// Does `call`, whose outputs hold this, by one or more calls of libtorch's engine, `run`.
  virtual tessera::detail::variable_list execute(const BackwardCall& call,
                                                 const RunBackward& run) = 0;
};

/// Makes autograd's engine use stand-ins; once for the process. Does nothing if another engine has
/// replaced libtorch's already, as Python's does: there they are tensors outside of any graph.
void ask_stand_ins();

}  // namespace tessera::nn
TESSERA_API_END
