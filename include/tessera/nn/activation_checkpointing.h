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

/// A function that returns whether to checkpoint the calls of a module. Must be a pure function,
/// with equal results on every rank.
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
  /// With n, only every n-th selected module is checkpointed, in the order of registration: the
  /// 1st, the (n+1)-th, and so on.
  std::size_t every = 1;
  CheckpointOptions options{};
};

/// Makes each call of the selected modules (`root` or modules below it) an nn::checkpoint().
/// Returns the FQNs of the selected modules. Modules that are already checkpointed are not changed.
/// Call apply_activation_checkpointing() after parallelize_module, whose hooks must run again in
/// the recomputation, and before fully_shard, whose all-gathers need not run again. Not collective;
/// select the same modules on every rank. Throws Error, before anything is changed, if no module is
/// selected.
std::vector<std::string> apply_activation_checkpointing(ModuleBase& root,
                                                        const ActivationCheckpointing& what);

}  // namespace tessera::nn
TESSERA_API_END
