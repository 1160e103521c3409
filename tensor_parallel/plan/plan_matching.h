#pragma once

#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::tensor_parallel {

/// A module below the one that a plan is applied to; `fqn` is empty for that one itself.
struct NamedModule {
  std::string fqn;
  nn::ModuleBase* module = nullptr;
};

/// The modules with an FQN that matches `pattern` (see nn::matches_fqn), each once, in order of
/// registration. "" is `root` itself. Throws Error if nothing matches, listing the children of the
/// deepest module that the pattern leads to; if a wildcard before the last segment matches modules
/// of one class and the pattern matches below some of them only; and if a match is a module without
/// hooks (a torch::nn module that is not held in nn::Hooked).
std::vector<NamedModule> match_modules(nn::ModuleBase& root, const std::string& pattern);

}  // namespace tessera::tensor_parallel
TESSERA_API_FOR_TEST_END
