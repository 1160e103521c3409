// A tree of slots beside a tree of libtorch's modules. A swap of a slot reaches the member that
// forward reads, and libtorch's own table, so that nobody keeps the unsharded tensor.

#include "tessera/nn/detail/adopted_module.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>

#include "adopted/member_tables.h"
#include "tessera/core/error.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::nn {
namespace {

bool has_tensors(const torch::nn::Module& module) {
  return !module.parameters().empty() || !module.buffers().empty();
}

/// The member of that name, if it holds `tensor`; else the end.
auto find_member(const detail::ModuleMembers& members, const std::string& name,
                 const at::Tensor& tensor) {
  return std::ranges::find_if(members, [&](const auto& each) {
    return each.first == name && each.second().is_same(tensor);
  });
}

/// Modules that have a holder.
struct Taken {
  std::mutex mutex;
  std::unordered_set<const torch::nn::Module*> modules;
};

/// Never destroyed: a holder may outlive other statics.
Taken& taken() {
  static auto* const all = new Taken;
  return *all;
}

}  // namespace

std::shared_ptr<const void> detail::claim_module(const torch::nn::Module& module) {
  const std::lock_guard lock(taken().mutex);
  TESSERA_CHECK(taken().modules.insert(&module).second, "nn::adopt was given a ", module.name(),
                " that was adopted before; use what the first call returned");
  return {&module, [](const torch::nn::Module* own) {
            const std::lock_guard unlisting(taken().mutex);
            taken().modules.erase(own);
          }};
}

AdoptedModule::AdoptedModule(std::shared_ptr<torch::nn::Module> module, const std::string& fqn,
                             Maker& maker)
    : ModuleBase(module->name()), module_(std::move(module)) {
  maker.fill(*this, *module_, fqn);
}

void AdoptedModule::train(bool on) {
  ModuleBase::train(on);
  module_->train(on);
}

void AdoptedModule::Maker::fill(ModuleBase& holder, torch::nn::Module& module,
                                const std::string& fqn) {
  add_parameters(holder, module, fqn);
  add_buffers(holder, module, fqn);
  for (const auto& child : module.named_children()) {
    if (has_tensors(*child.value())) {
      holder.register_module(child.key(), part_of(child.value(), join_fqn(fqn, child.key())));
    }
  }
}

detail::ModuleMembers AdoptedModule::Maker::tensors_of(torch::nn::Module& module) const {
  detail::ModuleMembers found;
  find_in_libtorch(module, found);
  for (const detail::FindMembers find : classes_) {
    find(module, found);
  }
  return found;
}

/// The tensor stays the same one until it is sharded: optimizers and members that have it see then
/// that it was replaced.
void AdoptedModule::Maker::add_parameters(ModuleBase& holder, torch::nn::Module& module,
                                          const std::string& fqn) {
  const detail::ModuleMembers members = tensors_of(module);
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    const std::string& name = parameter.key();
    const at::Tensor& tensor = parameter.value();
    const auto found = find_member(members, name, tensor);
    TESSERA_CHECK(
        found != members.end(), "parameter '", join_fqn(fqn, name), "' of a ", module.name(),
        " is read by its forward through a member that is not known, where no shard could "
        "reach it; name the member in nn::kSlotMembers of that class and pass the class, "
        "nn::adopt<Class>(module), or derive it from nn::Module");
    const auto [tied, is_new] = slots_.try_emplace(tessera::detail::identity_of(tensor));
    if (is_new) {
      tied->second = std::make_shared<ParameterSlot>(tensor, !tensor.is_meta());
    }
    holder.add_slot(name, tied->second,
                    [&module, name, member = found->second](const at::Tensor& swapped) {
                      parameter_table(module)[name] = swapped;
                      member() = swapped;
                    });
  }
}

/// The tensor itself, which forward writes in place. The statistics of norms are small: on the meta
/// device they get memory, and the values that they begin with, at once.
void AdoptedModule::Maker::add_buffers(ModuleBase& holder, torch::nn::Module& module,
                                       const std::string& fqn) {
  const detail::ModuleMembers members = tensors_of(module);
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    const std::string& name = buffer.key();
    at::Tensor tensor = buffer.value();
    if (tensor.is_meta()) {
      const auto found = find_member(members, name, tensor);
      TESSERA_CHECK(found != members.end(), "buffer '", join_fqn(fqn, name), "' of a ",
                    module.name(),
                    " would be on the meta device, where nothing can re-make it; construct it "
                    "outside the MetaDevice scope");
      tensor = at::zeros(tensor.sizes(), at::dtype(tensor.scalar_type()).device(at::kCPU))
                   .fill_(first_of_statistic(name));
      found->second() = tensor;
    }
    holder.register_buffer(name, tensor);
  }
}

std::shared_ptr<ModuleBase> AdoptedModule::Maker::part_of(
    const std::shared_ptr<torch::nn::Module>& module, const std::string& fqn) {
  if (auto ours = std::dynamic_pointer_cast<ModuleBase>(module)) {
    return ours;  // has slots and hooks
  }
  if (const auto found = parts_.find(module.get()); found != parts_.end()) {
    return found->second;
  }
  auto part = std::make_shared<AdoptedModule>(module, fqn, *this);
  parts_.emplace(module.get(), part);
  return part;
}

}  // namespace tessera::nn
