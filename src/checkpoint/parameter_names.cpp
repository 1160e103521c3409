#include "parameter_names.h"

#include <unordered_map>

namespace tessera::checkpoint {
namespace {

using Names = std::unordered_map<const nn::ParameterSlot*, std::vector<std::string>>;

void collect(const torch::nn::Module& module, const std::string& prefix, Names& names) {
  if (const auto* ours = dynamic_cast<const nn::ModuleBase*>(&module)) {
    for (const auto& [name, slot] : ours->slots()) names[slot.get()].push_back(prefix + name);
  }
  for (const auto& child : module.named_children()) {
    collect(*child.value(), prefix + child.key() + ".", names);
  }
}

}  // namespace

std::vector<NamedParameter> parameter_names(const nn::ModuleBase& module) {
  Names names;
  collect(module, "", names);
  std::vector<NamedParameter> parameters;
  for (const auto& [name, slot] : module.named_slots()) {
    parameters.push_back({slot, std::move(names.at(slot.get()))});
  }
  return parameters;
}

}  // namespace tessera::checkpoint
