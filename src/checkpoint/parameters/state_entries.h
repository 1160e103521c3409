#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "parameters/stored_tensors.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/nn/parameter.h"

namespace tessera::checkpoint {

/// A tensor of a checkpoint, and the tensor of the state that it is or is a part of. The parts of a
/// fused parameter are stored one by one, so that models with and without fusion can load them.
struct StateEntry {
  nn::SlotPtr slot;          ///< of the parameter, also for the optimizer's state beside it
  bool is_parameter = true;  ///< or a buffer; else an optimizer's state
  at::Tensor tensor;
  StoredTensor stored;             ///< under the first name
  std::vector<std::string> names;  ///< several for tied parameters
};

/// The same list on every rank, if the ranks have the same state. Throws Error for optimizer state
/// of a parameter that the model lacks.
std::vector<StateEntry> state_entries(const StateDict& state);

}  // namespace tessera::checkpoint
