#include "tessera/nn/activation_checkpointing.h"

#include <utility>

#include "tessera/core/error.h"
#include "tessera/nn/fqn_pattern.h"

namespace tessera::nn {
namespace {

using Named = std::vector<std::pair<std::string, ModuleBase*>>;

void collect(torch::nn::Module& module, const std::string& fqn, const ModulePredicate& select,
             Named& selected) {
  auto* ours = dynamic_cast<ModuleBase*>(&module);
  if (ours != nullptr && select(fqn, *ours)) selected.emplace_back(fqn, ours);
  for (const auto& child : module.named_children()) {
    collect(*child.value(), fqn.empty() ? child.key() : fqn + "." + child.key(), select, selected);
  }
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
  Named selected;
  collect(root, "", what.select, selected);
  TESSERA_CHECK(!selected.empty(), "activation checkpointing selects no module of this ",
                root.name(), "; look at the pattern or the class");
  std::vector<std::string> applied;
  for (std::size_t i = 0; i < selected.size(); i += what.every) {
    const auto& [fqn, module] = selected[i];
    if (module->checkpoints_calls()) continue;
    module->checkpoint_calls(what.options);
    applied.push_back(fqn);
  }
  return applied;
}

}  // namespace tessera::nn
