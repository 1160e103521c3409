#include "state_dict/state_items.h"

#include <map>
#include <utility>

#include "parameters/parameters.h"
#include "tessera/nn/module.h"

namespace tessera::checkpoint {
namespace {

bool is_left_out(const nn::ParameterSlot& slot, const StateDictOptions& options) {
  return options.ignore_frozen_params && !slot.persistent().requires_grad();
}

}  // namespace

std::vector<StateItem> model_items(const nn::ModuleBase& model, const StateDictOptions& options) {
  std::vector<StateItem> items;
  for (NamedParameter& parameter : saved_slots(model)) {
    const nn::SlotPtr slot = parameter.slot;
    items.push_back({slot, slot->persistent().detach(), std::move(parameter.names),
                     !parameter.is_buffer && is_left_out(*slot, options)});
  }
  return items;
}

std::vector<StateItem> optimizer_items(const nn::ModuleBase& model, const NamedTensors& named_state,
                                       const StateDictOptions& options) {
  std::map<std::string, nn::SlotPtr> slots;
  for (const auto& [name, slot] : model.named_slots()) {
    slots.emplace(name, slot);
  }
  std::vector<StateItem> items;
  for (const auto& [name, tensor] : named_state) {
    const nn::SlotPtr& slot = find_for_state(slots, name);
    items.push_back({slot, tensor.detach(), {name}, is_left_out(*slot, options)});
  }
  return items;
}

}  // namespace tessera::checkpoint
