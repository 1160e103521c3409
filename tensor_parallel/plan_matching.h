#pragma once

#include <string>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::tensor_parallel {

/// A module below the one that a plan is applied to; `fqn` is empty for that one itself.
struct NamedModule {
  std::string fqn;
  nn::ModuleBase* module = nullptr;
};

/// The modules whose FQN matches `pattern`: component by component, each as fnmatch(3), one
/// component a level. "" is `root` itself. Order: that of registration. Throws Error, listing the
/// children of the deepest level that was reached, if nothing matches, and if a match is a module
/// without hooks (a torch::nn module that is not held in nn::Hooked).
std::vector<NamedModule> match_modules(nn::ModuleBase& root, const std::string& pattern);

}  // namespace tessera::tensor_parallel
