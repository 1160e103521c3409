#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/nn/module.h"
#include "tessera/observe/verify.h"

namespace tessera::observe {

/// A tensor of a run on this rank, without autograd: distributed as it was, or plain.
struct SeenTensor {
  std::string name;  ///< "the output of 'layers.0.norm', call 2"; the same in each run
  std::string fqn;   ///< of the module or parameter
  at::Tensor value;
};

/// The tensors that one run of a step has produced.
struct SeenRun {
  std::vector<SeenTensor> outputs;    ///< in the order in which the calls ended; the result last
  std::vector<SeenTensor> gradients;  ///< of what is trained; none without a backward
  std::int64_t rows = 0;              ///< dimension 0 of the first tensor that the module was given
};

/// Runs `step` with `module`, and backward of a result that has a gradient. The parameters had no
/// gradients, and have none afterwards. Collective where the step is. An exception of the step is
/// an Error that names the innermost module that was running; a PeerError stays one.
SeenRun run_step(nn::ModuleBase& module, const VerifyStep& step);

}  // namespace tessera::observe
