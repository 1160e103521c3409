#pragma once

#include <string>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::checkpoint {

/// A parameter and every FQN that leads to it: several where it is tied.
struct NamedParameter {
  nn::SlotPtr slot;
  std::vector<std::string> names;
};

/// The parameters of a module, in its order, each once.
std::vector<NamedParameter> parameter_names(const nn::ModuleBase& module);

}  // namespace tessera::checkpoint
