// In-memory state dicts. set_model_state_dict() and set_optimizer_state_dict() compare everything
// before they change anything.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/core/Device.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "format.h"
#include "manifest.h"
#include "parameters.h"
#include "ranks.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/agreement.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/comm/world.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::checkpoint {

namespace {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// A tensor of a model or an optimizer, and the names of the tensor in a state dict.
struct StateItem {
  nn::SlotPtr slot;  ///< for optimizer state, the slot of its parameter
  at::Tensor tensor;
  std::vector<std::string> names;  ///< the tensor's names in a state dict; several if tied
  bool is_left_out = false;
};

bool is_left_out(const nn::ParameterSlot& slot, const StateDictOptions& options) {
  return options.ignore_frozen_params && !slot.persistent().requires_grad();
}

/// Returns the tensors of a model. Ranks with the same model get equal lists.
std::vector<StateItem> model_items(const nn::ModuleBase& model, const StateDictOptions& options) {
  std::vector<StateItem> items;
  for (NamedParameter& parameter : saved_slots(model)) {
    const nn::SlotPtr slot = parameter.slot;
    items.push_back({slot, slot->persistent().detach(), std::move(parameter.names),
                     !parameter.is_buffer && is_left_out(*slot, options)});
  }
  return items;
}

/// Returns the tensors of an optimizer's state. Throws Error for state of unknown parameters.
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

using Items = std::function<std::vector<StateItem>()>;

/// Gathers a tensor: returns the whole tensor on rank 0, and an undefined tensor on other ranks.
at::Tensor gather_on_rank0(const at::Tensor& tensor, comm::World& world) {
  at::Tensor whole;
  if (world.rank() == 0) {
    whole = at::empty(tensor.sizes(), at::device(at::kCPU).dtype(tensor.scalar_type()));
  }
  gather_blocks(tensor, tensor.scalar_type(), *all_ranks(world),
                c10::Device(world.options().device).type(),
                [&](std::span<const std::int64_t> offset, const at::Tensor& block) {
                  block_at(whole, offset, block.sizes()).copy_(block);
                });
  return whole;
}

at::Tensor value_of(const at::Tensor& tensor, comm::World& world, const StateDictOptions& options) {
  const bool distributed = tessera::is_distributed(tensor);
  if (options.full_state_dict && options.cpu_offload) {
    return gather_on_rank0(tensor, world);
  }
  if (options.full_state_dict) {
    return distributed ? DistributedTensor(tensor).full_tensor() : tensor;
  }
  if (!options.cpu_offload) {
    return tensor;
  }
  const at::Tensor host = local_tensor(tensor).detach().to(at::kCPU, /*non_blocking=*/false,
                                                           /*copy=*/true);
  return distributed ? make_distributed(host, sharding_spec(tensor), tensor.sizes().vec()) : host;
}

TensorDict get_state_dict(comm::World& world, const StateDictOptions& options,
                          const Items& items_of) {
  const at::NoGradGuard no_grad;
  std::vector<StateItem> items;
  run_or_fail_on_all(world, [&] {
    TESSERA_CHECK(!options.broadcast_from_rank0,
                  "broadcast_from_rank0 works only to load a state dict: leave the option out");
    items = items_of();
    std::erase_if(items, [](const StateItem& item) { return item.is_left_out; });
    for (const StateItem& item : items) {
      check_one_value(*item.slot, item.names.front());
      TESSERA_CHECK(item.slot->initialized() || !(options.full_state_dict || options.cpu_offload),
                    "parameter '", item.names.front(),
                    "' was never filled: call nn::init_weights(), or load a checkpoint first");
    }
  });
  TensorDict dict;
  try {
    for (const StateItem& item : items) {
      const at::Tensor value = value_of(item.tensor, world, options);
      for (const std::string& name : item.names) {
        if (value.defined()) {
          dict.emplace(name, value);
        }
      }
    }
  } catch (...) {
    world.abort();  // other ranks would wait forever for this rank's blocks
    throw;
  }
  return dict;
}

}  // namespace

TensorDict get_model_state_dict(comm::World& world, const nn::ModuleBase& model,
                                const StateDictOptions& options) {
  const comm::CallerScope caller("get_model_state_dict");
  return get_state_dict(world, options, [&] { return model_items(model, options); });
}

TensorDict get_optimizer_state_dict(comm::World& world, const nn::ModuleBase& model,
                                    const NamedTensors& named_state,
                                    const StateDictOptions& options) {
  const comm::CallerScope caller("get_optimizer_state_dict");
  return get_state_dict(world, options,
                        [&] { return optimizer_items(model, named_state, options); });
}

namespace {

/// Returns rank 0's state dict: on rank 0 the tensors themselves, on the other ranks meta tensors
/// of the same sizes and dtypes.
TensorDict outline_of_rank0(comm::World& world, const TensorDict& state) {
  nlohmann::json outline = nlohmann::json::object();
  for (const auto& [name, tensor] : state) {
    outline[name] = {static_cast<int>(tensor.scalar_type()), tensor.sizes().vec()};
  }
  const std::string text = comm::broadcast_text(
      *all_ranks(world), c10::Device(world.options().device), 0, outline.dump());
  if (world.rank() == 0) {
    return state;
  }
  TensorDict tensors;
  outline = nlohmann::json::parse(text);
  for (const auto& [name, each] : outline.items()) {
    tensors[name] =
        at::empty(each.at(1).get<std::vector<std::int64_t>>(),
                  at::device(at::kMeta).dtype(static_cast<c10::ScalarType>(each.at(0).get<int>())));
  }
  return tensors;
}

/// A tensor of the model or optimizer, and the value from the state dict that fills the tensor.
struct Source {
  const StateItem* item;
  at::Tensor value;
};

/// Throws Error if the value in the state dict does not fit the tensor of the model.
void check_source(const Source& source, const StateDictOptions& options) {
  const at::Tensor& into = source.item->tensor;
  const at::Tensor& value = source.value;
  const std::string& name = source.item->names.front();
  check_fillable(*source.item->slot, name);
  TESSERA_CHECK(value.sizes() == into.sizes(), "'", name, "' has the sizes [",
                fmt::format("{}", fmt::join(value.sizes(), ", ")), "] in the state dict, but [",
                fmt::format("{}", fmt::join(into.sizes(), ", ")),
                "] is needed: build the model with the options of the saved model");
  TESSERA_CHECK(is_convertible_type(value.scalar_type(), into.scalar_type()), "'", name,
                "' has the type ", c10::toString(value.scalar_type()), " in the state dict, but ",
                c10::toString(into.scalar_type()), " is needed: convert the tensor first");
  const bool distributed = tessera::is_distributed(value);
  TESSERA_CHECK(!options.full_state_dict || !distributed, "'", name,
                "' is a distributed tensor, but full_state_dict is set: pass full tensors, or "
                "leave full_state_dict out");
  if (!options.full_state_dict) {
    TESSERA_CHECK(distributed == tessera::is_distributed(into) &&
                      (!distributed || sharding_spec(value) == sharding_spec(into)),
                  "'", name,
                  "' has a different sharding in the state dict than in the model: get a full "
                  "state dict, and set full_state_dict");
  }
}

/// Throws Error unless a tied parameter has equal values under all of its names.
void check_ties(const StateItem& item, const TensorDict& state, const std::string& taken) {
  const at::Tensor one = local_tensor(state.at(taken)).detach();
  for (const std::string& name : item.names) {
    const auto other = state.find(name);
    if (other == state.end() || name == taken || one.is_meta()) {
      continue;
    }
    const at::Tensor copy = local_tensor(other->second).detach();
    const bool same = copy.is_same(one) ||
                      (copy.sizes() == one.sizes() && at::equal(one, copy.to(one.options())));
    TESSERA_CHECK(same, "'", taken, "' and '", name,
                  "' have different values in the state dict, but are one tied parameter of this "
                  "model: build the model with two parameters, or remove the wrong tensor");
  }
}

std::vector<Source> compare_state(const std::vector<StateItem>& items, const TensorDict& state,
                                  const StateDictOptions& options, IncompatibleKeys& keys) {
  std::vector<Source> sources;
  std::set<std::string> known;
  for (const StateItem& item : items) {
    known.insert(item.names.begin(), item.names.end());
    const auto found = std::ranges::find_if(
        item.names, [&state](const std::string& name) { return state.contains(name); });
    if (item.is_left_out) {
      continue;
    }
    if (found == item.names.end()) {
      keys.missing.push_back(item.names.front());
    } else {
      check_ties(item, state, *found);
      sources.push_back({&item, state.at(*found)});
    }
  }
  for (const auto& [name, tensor] : state) {
    if (!known.contains(name)) {
      keys.unexpected.push_back(name);
    }
  }
  TESSERA_CHECK(!options.strict || (keys.missing.empty() && keys.unexpected.empty()),
                "the state dict does not fit", listed("missing", keys.missing),
                listed("unexpected", keys.unexpected),
                ": pass a state dict of this model, or set strict to false");
  for (const Source& source : sources) {
    check_source(source, options);
  }
  return sources;
}

/// Copies into `tensor` those elements of `piece` that this rank stores. `piece` is the block of
/// the whole tensor that begins at `offset`.
void fill_piece(const at::Tensor& tensor, std::span<const std::int64_t> offset,
                const at::Tensor& piece) {
  const at::Tensor local = local_tensor(tensor).detach();
  for (const Box& box : owned_blocks(tensor)) {
    if (const auto here = common_block(box.global_offset, box.sizes, offset, piece.sizes())) {
      std::vector<std::int64_t> within = here->global_offset;
      std::ranges::transform(within, box.global_offset, within.begin(), std::minus<>());
      block_at(local_block(local, box), within, here->sizes)
          .copy_(block_at(piece, here->local_offset, here->sizes));
    }
  }
}

void fill_from_rank0(comm::World& world, const Source& source) {
  const c10::Device device(world.options().device);
  const auto group = all_ranks(world);
  const at::Tensor& value = source.value;
  const at::IntArrayRef all = value.sizes();
  for_each_piece(all, kMostPieceBytes / value.element_size(), [&](auto offset, auto sizes) {
    const at::Tensor piece = block_at(value, offset, sizes);
    const at::Tensor sent =
        world.rank() == 0 ? piece.detach().to(device).contiguous()
                          : at::empty(piece.sizes(), at::device(device).dtype(piece.scalar_type()));
    group->broadcast(sent, 0)->wait();
    fill_piece(source.item->tensor, offset, sent);
  });
}

void fill(comm::World& world, const Source& source, const StateDictOptions& options) {
  if (options.broadcast_from_rank0) {
    fill_from_rank0(world, source);
  } else if (options.full_state_dict) {
    const std::vector<std::int64_t> whole(static_cast<std::size_t>(source.value.dim()), 0);
    fill_piece(source.item->tensor, whole, source.value.detach());
  } else {
    local_tensor(source.item->tensor).copy_(local_tensor(source.value).detach());
  }
}

/// Fills the tensors that `items_of` lists. `fills_slots`: true if a model owns the tensors.
IncompatibleKeys set_state_dict(comm::World& world, const TensorDict& state,
                                const StateDictOptions& options, const Items& items_of,
                                bool fills_slots) {
  const at::NoGradGuard no_grad;
  std::vector<StateItem> items;
  std::vector<Source> sources;
  IncompatibleKeys keys;
  run_or_fail_on_all(world, [&] {
    TESSERA_CHECK(!options.broadcast_from_rank0 || options.full_state_dict,
                  "broadcast_from_rank0 is set, but full_state_dict is not: set full_state_dict");
    items = items_of();
  });
  const TensorDict values = options.broadcast_from_rank0 ? outline_of_rank0(world, state) : state;
  run_or_fail_on_all(world, [&] { sources = compare_state(items, values, options, keys); });
  try {
    for (const Source& source : sources) {
      fill(world, source, options);
      if (fills_slots) {
        source.item->slot->set_initialized(true);
      }
    }
  } catch (...) {
    world.abort();  // other ranks would wait forever for this rank
    throw;
  }
  return keys;
}

}  // namespace

IncompatibleKeys set_model_state_dict(comm::World& world, nn::ModuleBase& model,
                                      const TensorDict& state, const StateDictOptions& options) {
  const comm::CallerScope caller("set_model_state_dict");
  return set_state_dict(
      world, state, options, [&] { return model_items(model, options); }, /*fills_slots=*/true);
}

IncompatibleKeys set_optimizer_state_dict(comm::World& world, const nn::ModuleBase& model,
                                          const NamedTensors& named_state, const TensorDict& state,
                                          const StateDictOptions& options) {
  const comm::CallerScope caller("set_optimizer_state_dict");
  return set_state_dict(
      world, state, options, [&] { return optimizer_items(model, named_state, options); },
      /*fills_slots=*/false);
}

}  // namespace tessera::checkpoint
