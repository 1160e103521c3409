// Which modules of a model are checkpointed: selected by a predicate or a pattern, and of these
// every n-th. Checkpointing itself is in the other files of this folder.

#include "tessera/nn/activation_checkpointing.h"

#include <utility>

#include "tessera/core/error.h"
#include "tessera/nn/detail/adopted_module.h"
#include "tessera/nn/fqn_pattern.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::nn {
namespace {

using NamedModules = std::vector<std::pair<std::string, ModuleBase*>>;

NamedModules select_modules(ModuleBase& root, const ModulePredicate& select) {
  NamedModules selected;
  // At every place: a pattern may name any of a shared module's FQNs.
  visit_modules(root,
                [&](const std::string& fqn, ModuleBase& module) {
                  if (select(fqn, module)) {
                    selected.emplace_back(fqn, &module);
                  }
                },
                {.every_place = true});
  return selected;
}

}  // namespace

ModulePredicate named(std::string pattern) {
  return [pattern = std::move(pattern)](const std::string& fqn, const ModuleBase&) {
    return matches_fqn(pattern, fqn);
  };
}

std::vector<std::string> apply_activation_checkpointing(ModuleBase& root,
                                                        const ActivationCheckpointing& what) {
  TESSERA_CHECK(what.select && what.every > 0,
                "activation checkpointing needs a predicate that selects modules, and every n-th "
                "of them with n > 0");
  const NamedModules selected = select_modules(root, what.select);
  TESSERA_CHECK(!selected.empty(), "activation checkpointing selects no module of this ",
                root.name(), "; look at the pattern or the class");
  std::vector<std::string> applied;
  for (std::size_t i = 0; i < selected.size(); i += what.every) {
    const auto& [fqn, module] = selected[i];
    // Checkpointed before, or met at another place.
    if (module->checkpoints_calls()) {
      continue;
    }
    TESSERA_CHECK(
        dynamic_cast<const AdoptedModule*>(module) == nullptr, "activation checkpointing selects '",
        fqn, "', a ", module->name(),
        " inside of a module in nn::Hooked, which calls it without hooks; apply it to the "
        "module that nn::Hooked holds");
    module->checkpoint_calls(what.options);
    applied.push_back(fqn);
  }
  return applied;
}

}  // namespace tessera::nn
