#include "tessera/nn/initialization.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include <unordered_map>
#include <unordered_set>

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/fqn_pattern.h"
#include "tessera/nn/retired_parameter.h"

namespace tessera::nn {

/// State of one init_weights: which slots there are, under which name, and which are filled.
struct InitRun {
  InitRun(const ModuleBase& root, std::uint64_t run_seed) : seed(run_seed) {
    for (const auto& [name, slot] : root.named_slots()) fqn_of.emplace(slot.get(), name);
    for (const auto& [name, slot] : root.named_buffer_slots()) fqn_of.emplace(slot.get(), name);
  }

  void visit(torch::nn::Module& module, const std::string& fqn) {
    if (auto* ours = dynamic_cast<ModuleBase*>(&module)) {
      if (!visited.insert(ours).second) return;
      ours->reset_parameters(InitContext(*this, fqn));
    }
    for (const auto& child : module.named_children()) {
      visit(*child.value(), fqn.empty() ? child.key() : fqn + "." + child.key());
    }
  }

  std::uint64_t seed;
  bool buffers_only = false;
  std::unordered_map<const ParameterSlot*, std::string> fqn_of;
  std::unordered_set<const ParameterSlot*> filled;
  std::unordered_set<const ModuleBase*> visited;
};

namespace {

at::Tensor empty_on(const at::Tensor& tensor, c10::Device device) {
  const bool requires_grad = tensor.requires_grad();
  const at::Tensor local = at::empty_like(local_tensor(tensor).detach(), at::device(device));
  at::Tensor fresh = tessera::is_distributed(tensor)
                         ? make_distributed(local, sharding_spec(tensor), tensor.sizes().vec())
                         : local;
  return fresh.requires_grad_(requires_grad);
}

void materialise(ParameterSlot& slot, c10::Device device) {
  if (!slot.persistent().is_meta()) return;
  const at::Tensor fresh = empty_on(slot.persistent(), device);
  retire_parameter(slot.persistent(), "nn::to_empty");
  if (slot.has_persistent()) slot.set_persistent(fresh);
  slot.set(fresh);
  slot.set_initialized(false);
}

void refuse_meta_buffers(const ModuleBase& module) {
  for (const auto& buffer : module.named_buffers()) {
    TESSERA_CHECK(!buffer.value().is_meta(), "to_empty: buffer '", buffer.key(),
                  "' is on the meta device and cannot be swapped; make it by register_buffer_slot");
  }
}

void append_uninitialised(const NamedSlots& slots, std::vector<std::string>& names) {
  for (const auto& [name, slot] : slots) {
    if (!slot->initialized()) names.push_back(name);
  }
}

}  // namespace

void InitContext::fill(const Parameter& parameter, const Initializer& initializer) const {
  TESSERA_CHECK(parameter.slot(), "module '", fqn_, "' asked to fill a parameter that it lacks");
  fill(parameter.slot(), initializer);
}

void InitContext::fill(const SlotPtr& slot, const Initializer& initializer) const {
  const auto found = run_.fqn_of.find(slot.get());
  TESSERA_CHECK(found != run_.fqn_of.end(), "module '", fqn_,
                "' asked to fill a parameter that is not below the module being initialised");
  if (run_.buffers_only || !run_.filled.insert(slot.get()).second) return;
  TESSERA_CHECK(!slot->persistent().is_meta(), "parameter '", found->second,
                "' has no storage to fill; call nn::to_empty before nn::init_weights");
  initializer(slot->persistent(), {run_.seed, stream_of(found->second.c_str())});
  slot->set_initialized(true);
}

void InitContext::fill(const ModuleBase& module, const Initializers& table) const {
  const NamedSlots slots = module.named_slots();
  std::vector<bool> used(table.size());
  for (const auto& [name, slot] : slots) {
    bool taken = false;
    for (std::size_t i = 0; i < table.size(); ++i) {
      if (!matches_fqn(table[i].first, name)) continue;
      used[i] = true;
      if (!taken) fill(slot, table[i].second);
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
  TESSERA_CHECK(slot, "module '", fqn_, "' asked to set a buffer that it lacks");
  TESSERA_CHECK(!slot->get().is_meta(), "a buffer of module '", fqn_,
                "' has no storage to fill; call nn::to_empty before nn::init_weights");
  slot->set(values.to(slot->get().device()));
  slot->set_initialized(true);
}

RandomKey InitContext::key() const {
  return {run_.seed, stream_of(fqn_.c_str())};
}

void to_empty(ModuleBase& module, c10::Device device) {
  refuse_meta_buffers(module);
  for (const auto& [name, slot] : module.named_slots()) materialise(*slot, device);
  for (const auto& [name, slot] : module.named_buffer_slots()) materialise(*slot, device);
}

void init_weights(ModuleBase& module, std::uint64_t seed) {
  const c10::AutoGradMode no_grad(false);
  InitRun run(module, seed);
  run.visit(module, "");
  check_initialized(module);
}

void init_buffers(ModuleBase& module, std::uint64_t seed) {
  const c10::AutoGradMode no_grad(false);
  InitRun run(module, seed);
  run.buffers_only = true;
  run.visit(module, "");
}

void check_initialized(const ModuleBase& module) {
  std::vector<std::string> names;
  append_uninitialised(module.named_slots(), names);
  append_uninitialised(module.named_buffer_slots(), names);
  if (names.empty()) return;
  std::string first;
  for (std::size_t i = 0; i < names.size() && i < 3; ++i)
    first += (i == 0 ? "'" : ", '") + names[i] + "'";
  fail("the storage of ", names.size(), " parameters or buffers was never filled (", first,
       names.size() > 3 ? ", ...)" : ")",
       "; call nn::init_weights, load a checkpoint, or fill them in reset_parameters");
}

void mark_initialized(const SlotPtr& slot) {
  slot->set_initialized(true);
}

}  // namespace tessera::nn
