#include "parameters/state_entries.h"

#include <cstddef>
#include <map>
#include <utility>

#include "parameters/parameters.h"

namespace tessera::checkpoint {
namespace {

/// How a tensor beside a parameter is stored: by the parameter's parts if it has its sizes; whole,
/// once for each part, if it is a counter.
std::vector<StoredTensor> stored_beside(const std::string& fqn, const nn::ParameterSlot& slot,
                                        const at::Tensor& tensor) {
  std::vector<StoredTensor> stored = stored_tensors(fqn, slot);
  if (tensor.sizes() != slot.persistent().sizes()) {
    for (StoredTensor& part : stored) {
      part = {.name = part.name, .sizes = tensor.sizes().vec()};
    }
  }
  return stored;
}

/// The entries of `tensor`: the parameter itself, or state beside it, whose name is the
/// parameter's between `prefix` and `suffix`.
void add_entries(std::vector<StateEntry>& entries, const NamedParameter& parameter,
                 const at::Tensor& tensor, const std::string& prefix, const std::string& suffix) {
  const std::size_t begin = entries.size();
  for (const std::string& fqn : parameter.names) {
    std::vector<StoredTensor> stored = stored_beside(fqn, *parameter.slot, tensor);
    for (std::size_t i = 0; i < stored.size(); ++i) {
      stored[i].name = prefix + stored[i].name + suffix;
      if (entries.size() == begin + i) {
        entries.push_back({parameter.slot, prefix.empty(), tensor, stored[i], {}});
      }
      entries[begin + i].names.push_back(stored[i].name);
    }
  }
}

}  // namespace

std::vector<StateEntry> state_entries(const StateDict& state) {
  std::vector<StateEntry> entries;
  std::map<std::string, NamedParameter> parameters;
  for (NamedParameter& parameter : saved_slots(state.model)) {
    add_entries(entries, parameter, parameter.slot->persistent(), "", "");
    const std::string name = parameter.names.front();
    parameters.emplace(name, std::move(parameter));
  }
  for (const auto& [name, tensor] : state.optimizer) {
    const NamedParameter& parameter = find_for_state(parameters, name);
    add_entries(entries, parameter, tensor, "optimizer.state.", name.substr(name.rfind('.')));
  }
  return entries;
}

}  // namespace tessera::checkpoint
