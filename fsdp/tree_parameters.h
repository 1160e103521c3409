#pragma once

#include <string>
#include <vector>

#include "module_tree.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// A parameter of a module tree.
struct TreeParameter {
  std::string fqn;
  nn::SlotPtr slot;
  std::vector<std::string> owners;  ///< all FQNs of all modules that share it
};

/// Every parameter once, in the order of the tree's modules. Throws Error for one that a module
/// outside shares, and for one without a slot.
std::vector<TreeParameter> parameters_of(const ModuleTree& tree);

/// "the root", or the FQN in quotes.
std::string name_of(const std::string& fqn);

}  // namespace tessera::fsdp
