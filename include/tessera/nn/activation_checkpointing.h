#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// A function that decides whether the calls of a module are checkpointed. The function must be
/// pure, and must return the same result on every rank.
using ModulePredicate = std::function<bool(const std::string& fqn, const ModuleBase& module)>;

/// A predicate that selects the modules of class M or a derived class.
template <class M>
ModulePredicate of_class() {
  return [](const std::string&, const ModuleBase& module) {
    return dynamic_cast<const M*>(&module) != nullptr;
  };
}
/// A predicate that selects the modules whose FQN matches a pattern such as "model.layers.*"
/// (matches_fqn).
ModulePredicate named(std::string pattern);

/// Options of apply_activation_checkpointing(): which modules are checkpointed, and how.
struct ActivationCheckpointing {
  ModulePredicate select{};
  /// Only every `every`-th selected module is checkpointed, in the order of registration, starting
  /// with the first.
  std::size_t every = 1;
  CheckpointOptions options{};
};

/// Runs each call of the selected modules as an nn::checkpoint(). `root` itself may be selected.
/// Returns the FQNs of the selected modules. Modules that are already checkpointed are not changed.
/// Call this function after parallelize_module, so that the recomputation repeats the
/// tensor-parallel hooks, and before fully_shard, so that it does not repeat all-gathers. Not
/// collective; every rank must select the same modules. Throws Error, before anything is changed,
/// if no module is selected.
std::vector<std::string> apply_activation_checkpointing(ModuleBase& root,
                                                        const ActivationCheckpointing& what);

}  // namespace tessera::nn
TESSERA_API_END
