#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <functional>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// A call of libtorch's engine: what to compute (see torch::autograd::Engine::execute).
struct BackwardCall {
  torch::autograd::edge_list roots;
  torch::autograd::variable_list gradients;
  bool keep_graph = false;
  bool create_graph = false;
  bool accumulate = false;  ///< into `.grad` of `outputs`; false: return their gradients
  torch::autograd::edge_list outputs;
};
using RunBackward = std::function<torch::autograd::variable_list(const BackwardCall&)>;

/// Where autograd looks for the gradient of a parameter that persists while another tensor stands
/// in for it in forward. In a graph of the parameter itself it is libtorch's own node.
class StandInGradient : public torch::autograd::AccumulateGrad {
 public:
  using AccumulateGrad::AccumulateGrad;
  /// Does `call`, whose outputs hold this, by one or more calls of libtorch's engine, `run`.
  virtual torch::autograd::variable_list execute(const BackwardCall& call,
                                                 const RunBackward& run) = 0;
};

/// Makes autograd's engine ask them; once for the process. Does nothing in one that has replaced
/// libtorch's engine already, as Python does: there they are tensors that no graph knows.
void ask_stand_ins();

}  // namespace tessera::nn
TESSERA_API_END
