// Slots: the place of a parameter that outlives the tensor in it. A swap updates every module that
// shares the slot, because libtorch's Module holds tensors by name and knows no slots.

#include "tessera/nn/parameter.h"

#include <atomic>

#include "module/fill_epoch.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/parameter_name.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/nn/detail/origins.h"
#include "tessera/nn/detail/slot_keeper.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

using tessera::detail::writes_of;

namespace {

// Global: modules of several ranks, which may be threads, only check whether it has changed.
std::atomic<std::uint64_t> unfilled_slots = 1;

}  // namespace

// The wrapper and its local tensor may count apart. Both only grow, so that their sum changes with
// either.
std::uint64_t detail::written_version(const at::Tensor& tensor) {
  return std::uint64_t{writes_of(tensor)} + writes_of(local_tensor(tensor));
}

std::uint64_t detail::fill_epoch() {
  return unfilled_slots.load(std::memory_order_relaxed);
}

ParameterSlot::ParameterSlot(at::Tensor tensor, bool initialized) : tensor_(std::move(tensor)) {
  set_initialized(initialized);
}

bool ParameterSlot::initialized() const {
  return initialized_ || writes_of(persistent()) != unfilled_version_;
}

void ParameterSlot::set_initialized(bool initialized) {
  initialized_ = initialized;
  unfilled_version_ = writes_of(persistent());
  if (!initialized) {
    unfilled_slots.fetch_add(1, std::memory_order_relaxed);
  }
}

void ParameterSlot::set_fqn(const std::string& fqn) {
  if (fqn.size() <= fqn_.size()) {
    return;
  }
  fqn_ = fqn;
  tessera::detail::name_parameter(tensor_, fqn_);
  tessera::detail::name_parameter(persistent_, fqn_);
}

void ParameterSlot::set(at::Tensor tensor) {
  show(std::move(tensor));
  set_initialized(!tensor_.is_meta());
}

void ParameterSlot::swap(at::Tensor tensor) {
  const bool filled = initialized();
  show(std::move(tensor));
  if (!filled) {
    unfilled_version_ = writes_of(persistent());
  }
  initialized_ = filled;
}

void ParameterSlot::set_persistent(at::Tensor tensor) {
  const bool filled = initialized();
  persistent_ = std::move(tensor);
  set_initialized(filled);
  tessera::detail::name_parameter(persistent_, fqn_);
}

void ParameterSlot::show(at::Tensor tensor) {
  tensor_ = std::move(tensor);
  tessera::detail::name_parameter(tensor_, fqn_);
  for (const Owner& owner : owners_) {
    // Also libtorch's own table, so that parameters() lists what forward uses.
    owner.module->swap_parameter(owner.name, tensor_);
  }
}

void ParameterSlot::add_owner(ModuleBase* module, std::string name) {
  owners_.push_back({module, std::move(name)});
}

void ParameterSlot::remove_owner(const ModuleBase* module, const std::string& name) {
  std::erase_if(owners_,
                [&](const Owner& owner) { return owner.module == module && owner.name == name; });
}

const at::Tensor& Parameter::get() const {
  // An empty handle behaves as an undefined tensor, as an absent bias does.
  static const at::Tensor kUndefined;
  return slot_ == nullptr ? kUndefined : (*slot_)->get();
}

std::vector<NamedRows> rows_of_parts(const std::string& fqn, const StoredParts& stored) {
  const std::size_t leaf = fqn.rfind('.');
  const bool is_below = leaf != std::string::npos && leaf > 0;
  const std::size_t parent = is_below ? fqn.rfind('.', leaf - 1) : std::string::npos;
  const std::string above = parent == std::string::npos ? "" : fqn.substr(0, parent + 1);
  const std::string below = leaf == std::string::npos ? "." + fqn : fqn.substr(leaf);
  std::int64_t group_rows = 0;
  for (const StoredParts::Part& part : stored.parts) {
    group_rows += part.rows;
  }
  std::vector<NamedRows> parts;
  std::int64_t first = 0;
  for (const StoredParts::Part& part : stored.parts) {
    parts.push_back(
        {above + part.module + below,
         {.first = first, .run = part.rows, .group_rows = group_rows, .groups = stored.groups}});
    first += part.rows;
  }
  return parts;
}

std::string describe(const ParameterSlot& slot) {
  return slot.fqn().empty()
             ? tessera::detail::concat("a parameter of sizes ", slot.persistent().sizes())
             : "parameter '" + slot.fqn() + "'";
}

void drop_gradient(const ParameterSlot& slot) {
  // Both, since a gathered parameter has a separate gradient until it is reduced.
  slot.persistent().mutable_grad().reset();
  slot.get().mutable_grad().reset();
}

namespace {

template <class Ask>
bool any_keeper(const ParameterSlot& slot, const Ask& ask) {
  return std::ranges::any_of(slot.owners(), [&](const ParameterSlot::Owner& owner) {
    const auto keeper = owner.module->attached<SlotKeeper>();
    return keeper != nullptr && ask(*keeper);
  });
}

}  // namespace

bool is_computed_with(const ParameterSlot& slot, const at::Tensor& tensor) {
  return slot.get().is_same(tensor) || any_keeper(slot, [&](const SlotKeeper& keeper) {
           return keeper.is_unsharded(slot, tensor);
         });
}

bool brought_nonfinite(const ParameterSlot& slot) {
  return any_keeper(slot, [&](const SlotKeeper& keeper) { return keeper.brought_nonfinite(slot); });
}

}  // namespace tessera::nn
