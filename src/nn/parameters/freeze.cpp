// Which parameters are trained. A slot may hold two tensors, the shard and what forward uses of it:
// both are asked.

#include "tessera/nn/freeze.h"

#include <unordered_set>

#include "tessera/core/error.h"
#include "tessera/nn/detail/matched_slots.h"
#include "tessera/nn/fqn_pattern.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::nn {

void set_trainable(ParameterSlot& slot, bool trainable) {
  slot.persistent().requires_grad_(trainable);
  slot.get().requires_grad_(trainable);
}

std::unordered_set<SlotPtr> detail::matched_slots(const ModuleBase& module,
                                                  const std::vector<std::string>& patterns,
                                                  const char* caller) {
  std::vector<bool> used(patterns.size());
  std::unordered_set<SlotPtr> matched;
  // At every place: a tied parameter has several names.
  visit_modules(module,
                [&](const std::string& fqn, const ModuleBase& each) {
                  for (const auto& [name, slot] : each.slots()) {
                    for (std::size_t i = 0; i < patterns.size(); ++i) {
                      if (matches_fqn(patterns[i], join_fqn(fqn, name))) {
                        used[i] = true;
                        matched.insert(slot);
                      }
                    }
                  }
                },
                {.every_place = true});
  const NamedSlots slots = module.named_slots();
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    TESSERA_CHECK(used[i], caller, ": the pattern '", patterns[i], "' matches none of the ",
                  slots.size(), " parameters of a ", module.name(), "; FQNs look like '",
                  slots.empty() ? "" : slots.front().first,
                  "', and '**' stands for any number of their segments");
  }
  return matched;
}

void freeze(ModuleBase& module, const std::vector<std::string>& patterns) {
  for (const SlotPtr& slot : detail::matched_slots(module, patterns, "freeze")) {
    set_trainable(*slot, false);
  }
}

}  // namespace tessera::nn
