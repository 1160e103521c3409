#include <algorithm>

#include "tessera/nn/embedding.h"
#include "tessera/nn/fqn_pattern.h"
#include "tessera/optim/muon.h"

namespace tessera::optim {
namespace {

bool is_embedding(const nn::ParameterSlot& slot) {
  return std::ranges::any_of(slot.owners(), [](const nn::ParameterSlot::Owner& owner) {
    return dynamic_cast<const nn::Embedding*>(owner.module) != nullptr;
  });
}

}  // namespace

MuonSplit split_for_muon(const nn::ModuleBase& module, const std::vector<std::string>& rest) {
  MuonSplit split;
  for (const auto& [name, slot] : module.named_slots()) {
    const bool named = std::ranges::any_of(
        rest, [&fqn = name](const std::string& pattern) { return nn::matches_fqn(pattern, fqn); });
    const bool matrix = slot->persistent().dim() == 2 && !named && !is_embedding(*slot);
    (matrix ? split.matrices : split.rest).push_back(slot);
  }
  return split;
}

}  // namespace tessera::optim
