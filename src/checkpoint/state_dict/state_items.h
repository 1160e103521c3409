#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/checkpoint/state_dict.h"
#include "tessera/nn/parameter.h"

namespace tessera::checkpoint {

/// A tensor of a model or an optimizer, and its names in a state dict.
struct StateItem {
  nn::SlotPtr slot;  ///< of the parameter, also for the optimizer's state beside it
  at::Tensor tensor;
  std::vector<std::string> names;  ///< several for tied parameters
  bool is_left_out = false;        ///< the options leave it out
};

/// The same list on every rank, if the ranks have the same model.
std::vector<StateItem> model_items(const nn::ModuleBase& model, const StateDictOptions& options);
/// Throws Error for state of a parameter that the model lacks.
std::vector<StateItem> optimizer_items(const nn::ModuleBase& model, const NamedTensors& named_state,
                                       const StateDictOptions& options);

}  // namespace tessera::checkpoint
