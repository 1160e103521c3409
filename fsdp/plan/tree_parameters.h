#pragma once

#include <string>
#include <vector>

#include "tessera/nn/module.h"
#include "unit/module_tree.h"

namespace tessera::fsdp {

/// The input of a plan of `root`: modules that are in no unit, or in one that root's applied plan
/// made, so that the same policy gives the same plan again. Throws Error if there is none.
ModuleTree plannable_tree(const nn::ModuleBase& root, const char* asked);

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
