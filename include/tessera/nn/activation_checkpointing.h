#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "tessera/nn/checkpoint.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

/// A pure function: whether the calls of the module `fqn` are to be checkpointed.
using ModulePredicate = std::function<bool(const std::string& fqn, const ModuleBase& module)>;

/// Modules of class M (or derived from it).
template <class M>
ModulePredicate of_class() {
  return [](const std::string&, const ModuleBase& module) {
    return dynamic_cast<const M*>(&module) != nullptr;
  };
}
/// Modules whose FQN matches a pattern (see matches_fqn): "model.layers.*".
ModulePredicate named(std::string pattern);

/// Which modules are checkpointed, and how.
struct ActivationCheckpointing {
  ModulePredicate select{};
  /// Of the modules selected, in order of registration, every n-th: the 1st, the (n+1)-th, ...
  std::size_t every = 1;
  CheckpointOptions options{};
};

/// Makes each call of the modules selected below `root` (`root` too) a checkpoint(), and returns
/// their FQNs. Modules that are checkpointed already are left as they are. Apply it after tensor
/// parallelism, whose hooks recomputation must repeat, and before fully_shard, whose gathers it
/// need not. Not collective; the same on every rank. Throws Error, before anything is changed, if
/// nothing is selected.
std::vector<std::string> apply_activation_checkpointing(ModuleBase& root,
                                                        const ActivationCheckpointing& what);

}  // namespace tessera::nn
