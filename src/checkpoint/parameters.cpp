#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "format.h"
#include "parameters.h"
#include "ranks.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/lora.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"

namespace tessera::checkpoint {
namespace {

/// Returns each parameter of a module once, in order of registration. A tied parameter has all of
/// its FQNs, because files can use any of the FQNs.
std::vector<NamedParameter> parameter_names(const nn::ModuleBase& module) {
  std::unordered_map<const nn::ParameterSlot*, std::vector<std::string>> names;
  nn::visit_modules(module,
                    [&](const std::string& fqn, const nn::ModuleBase& each) {
                      for (const auto& [name, slot] : each.slots()) {
                        names[slot.get()].push_back(nn::detail::join_fqn(fqn, name));
                      }
                    },
                    {.every_place = true});
  std::vector<NamedParameter> parameters;
  for (const auto& [name, slot] : module.named_slots()) {
    parameters.push_back({slot, std::move(names.at(slot.get()))});
  }
  return parameters;
}

/// Returns the tensors in which files store the optimizer state `tensor` of a parameter. State with
/// the parameter's sizes is split like the parameter; other state is repeated.
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

std::vector<NamedParameter> saved_slots(const nn::ModuleBase& module) {
  std::vector<NamedParameter> slots = parameter_names(module);
  for (const auto& [name, slot] : module.named_buffer_slots()) {
    if (slot->role.saved) {
      slots.push_back({slot, {name}, /*is_buffer=*/true});
    }
  }
  for (const auto& buffer : module.named_buffers()) {
    const auto slot =
        std::make_shared<nn::ParameterSlot>(buffer.value(), !buffer.value().is_meta());
    slots.push_back({slot, {buffer.key()}, /*is_buffer=*/true});
  }
  return slots;
}

std::vector<NamedParameter> model_slots(const nn::ModuleBase& module) {
  std::unordered_set<nn::SlotPtr> adapters;
  for (const auto& [name, slot] : nn::lora_slots(module)) {
    adapters.insert(slot);
  }
  std::vector<NamedParameter> slots = saved_slots(module);
  std::erase_if(slots, [&](const auto& each) { return adapters.contains(each.slot); });
  return slots;
}

nlohmann::json dropout_calls(const nn::ModuleBase& module) {
  nlohmann::json calls = nlohmann::json::object();
  nn::visit_modules(module, [&](const std::string& fqn, const nn::ModuleBase& each) {
    if (const auto* dropout = dynamic_cast<const nn::Dropout*>(&each)) {
      calls[fqn] = dropout->calls();
    }
  });
  return calls;
}

void check_one_value(const nn::ParameterSlot& slot, const std::string& name) {
  check_gatherable(slot.persistent(), name);
  TESSERA_CHECK(!slot.distinct_along() || slot.distinct_along().size() == 1, "parameter '", name,
                "' has different values on each rank of its mesh (set_distinct_along), but a file "
                "holds one tensor for each name; before saving, gather the experts into parameters "
                "with different names");
}

void check_filled(const std::vector<NamedParameter>& parameters) {
  for (const NamedParameter& each : parameters) {
    TESSERA_CHECK(
        each.slot->initialized(), each.is_buffer ? "buffer '" : "parameter '", each.names.front(),
        "' was never filled: call nn::init_weights(), or load a checkpoint, before saving");
  }
}

void check_fillable(const nn::ParameterSlot& slot, const std::string& name) {
  TESSERA_CHECK(!local_tensor(slot.persistent()).is_meta(), "parameter '", name,
                "' has no storage: call nn::to_empty() before loading");
  // While a parameter is gathered, a load would fill only its FSDP shard: forward and backward
  // would still use the old gathered values.
  TESSERA_CHECK(!slot.role.gathered, "parameter '", name,
                "' is gathered: load before the first forward, or call fsdp::reshard() first");
}

bool is_convertible_type(c10::ScalarType from, c10::ScalarType to) {
  // Only plain floating-point types are convertible: quantized weights would need their scales.
  const auto is_plain_float = [](c10::ScalarType type) {
    return type == c10::kFloat || type == c10::kHalf || type == c10::kBFloat16 ||
           type == c10::kDouble;
  };
  return from == to || (is_plain_float(from) && is_plain_float(to));
}

std::string listed(const char* what, const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 5;
  if (names.empty()) {
    return "";
  }
  const auto end = names.begin() + static_cast<std::ptrdiff_t>(std::min(kShown, names.size()));
  const auto more = names.size() > kShown ? fmt::format(" and {} more", names.size() - kShown) : "";
  return fmt::format("; {}: {}{}", what, fmt::join(names.begin(), end, ", "), more);
}

void StoredTensor::visit(std::span<const std::int64_t> offset, const at::Tensor& block,
                         const Visit& visit) const {
  if (!rows) {
    return visit(offset, block);
  }
  std::vector<std::int64_t> at(offset.begin(), offset.end());
  rows->visit(offset[0], block.size(0),
              [&](std::int64_t row, std::int64_t from, std::int64_t count) {
                const at::Tensor part = block.narrow(0, from, count);
                if (is_matrix_of_stack) {
                  return visit(std::span(at).subspan(1), part.squeeze(0));
                }
                at[0] = row;
                visit(at, part);
              });
}

void StoredTensor::visit_own(const at::Tensor& parameter, const Visit& visit) const {
  const at::Tensor local = local_tensor(parameter).detach();
  for (const Box& box : owned_blocks(parameter)) {
    this->visit(box.global_offset, local_block(local, box), visit);
  }
}

std::vector<StoredTensor> stored_tensors(const std::string& fqn, const nn::ParameterSlot& slot) {
  const std::vector<std::int64_t> sizes = slot.persistent().sizes().vec();
  if (!slot.role.stored_parts) {
    return {{.name = fqn, .sizes = sizes}};
  }
  std::vector<StoredTensor> tensors;
  for (const nn::NamedRows& part : nn::rows_of_parts(fqn, *slot.role.stored_parts)) {
    tensors.push_back({.name = part.name, .sizes = sizes, .rows = part.rows});
    if (slot.role.stored_parts->stacked) {
      tensors.back().is_matrix_of_stack = true;
      tensors.back().sizes.erase(tensors.back().sizes.begin());
    } else {
      tensors.back().sizes[0] = part.rows.run * part.rows.groups;
    }
  }
  return tensors;
}

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
