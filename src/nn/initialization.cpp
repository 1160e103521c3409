// Implements to_empty and init_weights. Each rank initializes its own shards. A value depends only
// on the seed, the parameter's FQN and the element's global index, so every mesh gets equal values.

#include "tessera/nn/initialization.h"
#include "tessera/dtensor/detail/make_distributed.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include <unordered_map>
#include <unordered_set>

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/copy_check.h"
#include "tessera/nn/detail/slots.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

struct InitRun {
  InitRun(const ModuleBase& root, std::uint64_t run_seed) : seed(run_seed) {
    for (const auto& [name, slot] : root.named_slots()) {
      fqn_of.emplace(slot.get(), name);
    }
    for (const auto& [name, slot] : root.named_buffer_slots()) {
      fqn_of.emplace(slot.get(), name);
    }
  }

  /// Visits parent modules before child modules, because a block can initialise a child Linear.
  void reset_all(ModuleBase& root) {
    const c10::AutoGradMode no_grad(false);
    visit_modules(root, [this](const std::string& fqn, ModuleBase& module) {
      module.reset_parameters(InitContext(*this, fqn));
    });
  }

  std::uint64_t seed;
  bool buffers_only = false;
  bool unfilled_only = false;
  // The map has only the first FQN of a tied parameter, so a tied parameter is filled only once.
  std::unordered_map<const ParameterSlot*, std::string> fqn_of;
  std::unordered_set<const ParameterSlot*> filled;
};

namespace {

constexpr auto kFillOthers =
    "fill them in reset_parameters of their class or, in a module from nn::adopt, with "
    "set_initializers";

/// Returns a random stream for each part of a fused parameter. The part's name determines the
/// stream, so separate parameters would get the same values.
std::vector<RandomPart> parts_of(const std::string& fqn, const ParameterSlot& slot) {
  std::vector<RandomPart> parts;
  if (slot.role.stored_parts) {
    for (const NamedRows& part : rows_of_parts(fqn, *slot.role.stored_parts)) {
      parts.push_back({stream_of(part.name.c_str()), part.rows});
    }
  }
  return parts;
}

at::Tensor empty_on(const at::Tensor& tensor, c10::Device device) {
  const bool requires_grad = tensor.requires_grad();
  const at::Tensor local = at::empty_like(local_tensor(tensor).detach(), at::device(device));
  at::Tensor fresh = tessera::is_distributed(tensor)
                         ? make_distributed(local, sharding_spec(tensor), tensor.sizes().vec())
                         : local;
  return fresh.requires_grad_(requires_grad);
}

void materialise(ParameterSlot& slot, c10::Device device) {
  if (!slot.persistent().is_meta()) {
    return;
  }
  const at::Tensor fresh = empty_on(slot.persistent(), device);
  retire_parameter(slot.persistent(), fresh, "nn::to_empty");
  if (slot.has_persistent()) {
    // An FSDP unit all-gathers the new shard from the unit's next iteration on.
    slot.set_persistent(fresh);
  }
  slot.swap(fresh);
  slot.set_initialized(false);
}

}  // namespace

void InitContext::fill(const Parameter& parameter, const Initializer& initializer) const {
  TESSERA_CHECK(parameter.slot(), "module '", fqn_,
                "' tried to fill a parameter that does not exist");
  fill(parameter.slot(), initializer);
}

void InitContext::fill(const SlotPtr& slot, const Initializer& initializer) const {
  const auto found = run_.fqn_of.find(slot.get());
  TESSERA_CHECK(found != run_.fqn_of.end(), "module '", fqn_,
                "' tried to fill a parameter outside of the module being initialised");
  if (run_.buffers_only || !run_.filled.insert(slot.get()).second) {
    return;
  }
  if (run_.unfilled_only && slot->initialized()) {
    return;  // a checkpoint or a weights file has filled the parameter
  }
  TESSERA_CHECK(!slot->persistent().is_meta(), "parameter '", found->second,
                "' has no storage to fill; call nn::to_empty before nn::init_weights");
  // The random stream depends only on the parameter's FQN: more parameters in the model do not
  // change the values of this parameter.
  const std::vector<RandomPart> parts = parts_of(found->second, *slot);
  initializer(slot->persistent(), {run_.seed, stream_of(found->second.c_str()), parts});
  slot->set_initialized(true);
  detail::note_origin(*slot, detail::origin_of_seed(run_.seed));
}

void InitContext::fill(const ModuleBase& module, const Initializers& table) const {
  const NamedSlots slots = module.named_slots();
  std::vector<bool> used(table.size());
  for (const auto& [name, slot] : slots) {
    // Patterns such as "**.weight" also match adapters. A new adapter must not change the model's
    // results, so patterns do not apply to adapters.
    if (slot->role.of_adapter) {
      continue;
    }
    bool taken = false;
    for (std::size_t i = 0; i < table.size(); ++i) {
      if (!matches_fqn(table[i].first, name)) {
        continue;
      }
      // A pattern that matches a parameter counts as used, even if an earlier pattern has filled
      // the parameter.
      used[i] = true;
      if (!taken) {
        fill(slot, table[i].second);
      }
      taken = true;
    }
  }
  for (std::size_t i = 0; i < table.size(); ++i) {
    TESSERA_CHECK(used[i], "the initialiser for '", table[i].first, "' matches no parameter of '",
                  fqn_.empty() ? module.name() : fqn_, "'");
  }
}

void InitContext::set_buffer(const Parameter& buffer, const at::Tensor& values) const {
  const SlotPtr slot = buffer.slot();
  TESSERA_CHECK(slot, "module '", fqn_, "' tried to set a buffer that the module does not have");
  TESSERA_CHECK(!slot->get().is_meta(), "a buffer of module '", fqn_,
                "' has no storage to fill; call nn::to_empty before nn::init_weights");
  const bool after_load = run_.buffers_only || run_.unfilled_only;
  if (after_load && slot->role.saved && slot->initialized()) {
    return;  // a checkpoint or a weights file has filled the buffer
  }
  // Buffers are plain tensors: every rank computes the same values for a buffer.
  slot->set(values.to(slot->get().device()));
}

bool InitContext::buffers_only() const {
  return run_.buffers_only;
}

RandomKey InitContext::key() const {
  return {run_.seed, stream_of(fqn_.c_str())};
}

void to_empty(ModuleBase& module, c10::Device device) {
  refuse_meta_buffers(module, "to_empty");
  for (const auto& [name, slot] : module.named_slots()) {
    materialise(*slot, device);
  }
  for (const auto& [name, slot] : module.named_buffer_slots()) {
    materialise(*slot, device);
  }
}

void init_weights(ModuleBase& module, std::uint64_t seed) {
  InitRun(module, seed).reset_all(module);
  check_filled(module, "init_weights", kFillOthers);
}

void init_unfilled(ModuleBase& module, std::uint64_t seed) {
  InitRun run(module, seed);
  run.unfilled_only = true;
  run.reset_all(module);
  check_filled(module, "init_unfilled", kFillOthers);
}

void init_buffers(ModuleBase& module, std::uint64_t seed) {
  InitRun run(module, seed);
  run.buffers_only = true;
  run.reset_all(module);
}

}  // namespace tessera::nn

namespace tessera::nn::init {

Initializer constant(double value) {
  return [=](const at::Tensor& tensor, RandomKey) { local_tensor(tensor).detach().fill_(value); };
}

Initializer zeros() {
  return constant(0.0);
}

Initializer ones() {
  return constant(1.0);
}

Initializer uniform(double from, double to) {
  return [=](const at::Tensor& tensor, RandomKey key) { uniform_(tensor, from, to, key); };
}

Initializer normal(double mean, double std) {
  return [=](const at::Tensor& tensor, RandomKey key) { normal_(tensor, mean, std, key); };
}

Initializer trunc_normal(double mean, double std, double low, double high) {
  return [=](const at::Tensor& tensor, RandomKey key) {
    trunc_normal_(tensor, mean, std, low, high, key);
  };
}

}  // namespace tessera::nn::init
