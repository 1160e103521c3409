// The policies that select operators, and apply_activation_checkpointing().

#include "tessera/nn/activation_checkpointing.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/nn/detail/adopted_module.h"
#include "tessera/nn/fqn_pattern.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

OperatorPolicy save_operators(std::vector<std::string> names) {
  return [names = std::move(names)](const OperatorCall& call) {
    const bool named = std::ranges::find(names, call.name) != names.end();
    return named ? SavePolicy::kMustSave : SavePolicy::kPreferRecompute;
  };
}

OperatorPolicy save_matmuls_and_attention() {
  // Saves the results of the operators with the most compute per byte of result.
  return save_operators(
      {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "tessera::fp8_linear",
       "aten::convolution", "aten::_scaled_dot_product_flash_attention",
       "aten::_scaled_dot_product_flash_attention_for_cpu",
       "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
       "aten::_flash_attention_forward", "aten::_efficient_attention_forward",
       "tessera::chunked_attention"});
}

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
  std::vector<std::pair<std::string, ModuleBase*>> selected;
  // Visits a shared module under each of its FQNs, because a pattern may match any of them.
  visit_modules(root,
                [&](const std::string& fqn, ModuleBase& module) {
                  if (what.select(fqn, module)) {
                    selected.emplace_back(fqn, &module);
                  }
                },
                {.every_place = true});
  TESSERA_CHECK(!selected.empty(), "activation checkpointing selects no module of this ",
                root.name(), "; look at the pattern or the class");
  std::vector<std::string> applied;
  for (std::size_t i = 0; i < selected.size(); i += what.every) {
    const auto& [fqn, module] = selected[i];
    // Skips a module that is already checkpointed, or was visited under another FQN.
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
