#include "tessera/optim/optimizer.h"

#include <unordered_map>

#include "tessera/core/error.h"
#include "tessera/nn/kept_gradients.h"

namespace tessera::optim {

void Optimizer::zero_grad() {
  for (const nn::SlotPtr& slot : parameters()) {
    nn::drop_gradient(*slot);
  }
}

std::vector<nn::SlotPtr> slots_of(const nn::ModuleBase& module) {
  std::vector<nn::SlotPtr> slots;
  for (auto& [name, slot] : module.named_slots()) slots.push_back(slot);
  return slots;
}

std::vector<std::pair<std::string, at::Tensor>> named_state(Optimizer& optimizer,
                                                            const nn::ModuleBase& module) {
  std::unordered_map<const nn::ParameterSlot*, std::string> names;
  for (const auto& [name, slot] : module.named_slots()) names.emplace(slot.get(), name);
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (StateTensor& state : optimizer.state()) {
    const auto found = names.find(state.slot.get());
    TESSERA_CHECK(found != names.end(), "the optimizer updates a parameter of sizes ",
                  state.slot->persistent().sizes(),
                  " that is not in the module whose names were asked for; pass the module that the "
                  "optimizer was made for");
    named.emplace_back(found->second + "." + state.name, std::move(state.tensor));
  }
  return named;
}

}  // namespace tessera::optim
