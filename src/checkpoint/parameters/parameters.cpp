#include "parameters/parameters.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "blocks/gather_blocks.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::checkpoint {
namespace {

/// Formats of quantised weights mean nothing without their scales.
bool is_plain_float(c10::ScalarType type) {
  return type == c10::kFloat || type == c10::kHalf || type == c10::kBFloat16 ||
         type == c10::kDouble;
}

}  // namespace

/// Tied parameters are visited at every place of the tree, because files may have them under any of
/// their names.
std::vector<NamedParameter> parameter_names(const nn::ModuleBase& module) {
  std::unordered_map<const nn::ParameterSlot*, std::vector<std::string>> names;
  nn::visit_modules(module,
                    [&](const std::string& fqn, const nn::ModuleBase& each) {
                      for (const auto& [name, slot] : each.slots()) {
                        names[slot.get()].push_back(nn::join_fqn(fqn, name));
                      }
                    },
                    {.every_place = true});
  std::vector<NamedParameter> parameters;
  for (const auto& [name, slot] : module.named_slots()) {
    parameters.push_back({slot, std::move(names.at(slot.get()))});
  }
  return parameters;
}

std::vector<NamedParameter> saved_slots(const nn::ModuleBase& module) {
  std::vector<NamedParameter> slots = parameter_names(module);
  for (const auto& [name, slot] : module.named_buffer_slots()) {
    if (slot->saved()) {
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

void check_one_value(const nn::ParameterSlot& slot, const std::string& name) {
  check_gatherable(slot.persistent(), name);
  TESSERA_CHECK(
      !slot.distinct_along() || slot.distinct_along().size() == 1, "parameter '", name,
      "' has other values on each rank of its mesh (set_distinct_along), but a file holds "
      "one tensor under that name; gather such experts into parameters of different "
      "names before saving");
}

void check_filled(const std::vector<NamedParameter>& parameters) {
  for (const NamedParameter& each : parameters) {
    TESSERA_CHECK(each.slot->initialized(), each.is_buffer ? "buffer '" : "parameter '",
                  each.names.front(),
                  "' was never filled: call nn::init_weights() or load before saving");
  }
}

void check_fillable(const nn::ParameterSlot& slot, const std::string& name) {
  TESSERA_CHECK(!local_tensor(slot.persistent()).is_meta(), "parameter '", name,
                "' has no storage: call nn::to_empty() before loading");
  // The shard would be filled, and forward or backward would continue with the old values.
  TESSERA_CHECK(!slot.gathered(), "parameter '", name,
                "' is gathered: load before the first forward, or call fsdp::reshard() first");
}

bool is_convertible_type(c10::ScalarType from, c10::ScalarType to) {
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

}  // namespace tessera::checkpoint
