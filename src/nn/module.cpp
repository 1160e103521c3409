#include "tessera/nn/module.h"

#include <ATen/ops/empty.h>
#include <c10/core/DefaultDtype.h>

#include <unordered_set>

#include "tessera/core/error.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/meta_device.h"

namespace tessera::nn {
namespace {

at::Tensor uninitialised(at::IntArrayRef sizes) {
  const c10::Device device = MetaDevice::active() ? c10::kMeta : c10::kCPU;
  return at::empty(sizes, at::dtype(c10::get_default_dtype_as_scalartype()).device(device));
}

std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

using OwnSlots = const NamedSlots& (ModuleBase::*)() const;

/// Depth first, in order of registration: what named_slots and named_buffer_slots list.
class SlotCollector {
 public:
  explicit SlotCollector(OwnSlots own) : own_(own) {}

  NamedSlots collect(const ModuleBase& root) {
    visit(root, "");
    return std::move(found_);
  }

 private:
  void visit(const torch::nn::Module& module, const std::string& prefix) {
    if (const auto* ours = dynamic_cast<const ModuleBase*>(&module)) {
      for (const auto& [name, slot] : (ours->*own_)()) {
        if (seen_.insert(slot.get()).second) found_.emplace_back(join(prefix, name), slot);
      }
    } else {
      refuse_parameters(module, prefix);
    }
    for (const auto& child : module.named_children()) {
      visit(*child.value(), join(prefix, child.key()));
    }
  }

  static void refuse_parameters(const torch::nn::Module& module, const std::string& prefix) {
    const auto own = module.named_parameters(/*recurse=*/false);
    if (own.is_empty()) return;
    fail("parameter '", join(prefix, own.front().key()), "' of a ", module.name(),
         " has no slot; hold the module in nn::Hooked, or derive it from nn::Module");
  }

  OwnSlots own_;
  NamedSlots found_;
  std::unordered_set<const ParameterSlot*> seen_;
};

/// Of the module and all below it.
void check_not_gathered(const torch::nn::Module& module) {
  if (const auto* ours = dynamic_cast<const ModuleBase*>(&module)) {
    for (const auto& [name, slot] : ours->slots()) {
      TESSERA_CHECK(slot->get().is_same(slot->persistent()), "conversion of a ", module.name(),
                    ", but FSDP has gathered its parameter '", name,
                    "'; convert before forward or after backward, or reshard it first");
    }
  }
  for (const auto& child : module.children()) check_not_gathered(*child);
}

}  // namespace

ModuleBase::~ModuleBase() {
  for (const auto& [name, slot] : slots_) slot->remove_owner(this, name);
}

NamedSlots ModuleBase::named_slots() const {
  return SlotCollector(&ModuleBase::slots).collect(*this);
}

NamedSlots ModuleBase::named_buffer_slots() const {
  return SlotCollector(&ModuleBase::buffer_slots).collect(*this);
}

std::size_t ModuleBase::index_of(const std::string& name) const {
  std::string known;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].first == name) return i;
    known += (i == 0 ? "" : ", ") + slots_[i].first;
  }
  fail("parameter '", name, "' of a ", this->name(), " was asked for; it has ",
       known.empty() ? "none" : known);
}

const SlotPtr& ModuleBase::slot(const std::string& name) const {
  return slots_[index_of(name)].second;
}

void ModuleBase::tie_slot(const std::string& name, const SlotPtr& slot) {
  const std::size_t index = index_of(name);
  SlotPtr& current = slots_[index].second;
  if (current == slot) return;
  TESSERA_CHECK(current->get().sizes() == slot->get().sizes(), "parameter '", name, "' of sizes ",
                current->get().sizes(), " was to be tied to one of sizes ", slot->get().sizes());
  current->remove_owner(this, name);
  current = slot;
  *bindings_[index].handle = slot;
  slot->add_owner(this, name);
  swap_parameter(name, slot->get());
}

void ModuleBase::reset_parameters(const InitContext&) {}

std::shared_ptr<torch::nn::Module> ModuleBase::clone(const std::optional<torch::Device>&) const {
  fail("clone() of a ", name(),
       " was asked for; build a second module with the same arguments and "
       "copy the values of named_slots() into it");
}

void ModuleBase::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  check_not_gathered(*this);
  torch::nn::Module::to(device, dtype, non_blocking);
  convert_buffers(device, dtype, non_blocking);
}

void ModuleBase::to(torch::Dtype dtype, bool non_blocking) {
  check_not_gathered(*this);
  torch::nn::Module::to(dtype, non_blocking);
  convert_buffers(std::nullopt, dtype, non_blocking);
}

void ModuleBase::to(torch::Device device, bool non_blocking) {
  check_not_gathered(*this);
  torch::nn::Module::to(device, non_blocking);
  convert_buffers(device, std::nullopt, non_blocking);
}

void ModuleBase::convert_buffers(std::optional<torch::Device> device,
                                 std::optional<torch::Dtype> dtype, bool non_blocking) {
  for (const auto& [name, slot] : buffer_slots_) {
    const at::Tensor& buffer = slot->get();
    slot->set(buffer.to(
        device.value_or(buffer.device()),
        buffer.is_floating_point() ? dtype.value_or(buffer.scalar_type()) : buffer.scalar_type(),
        non_blocking));
  }
}

Parameter ModuleBase::register_slot(const std::string& name, at::IntArrayRef sizes) {
  at::Tensor tensor = uninitialised(sizes).requires_grad_();
  return add_slot(name, std::make_shared<ParameterSlot>(std::move(tensor), false), nullptr);
}

Parameter ModuleBase::register_slot(const std::string& name, at::Tensor tensor) {
  const bool initialized = !tensor.is_meta();
  tensor = tensor.detach().requires_grad_(tensor.is_floating_point());
  return add_slot(name, std::make_shared<ParameterSlot>(std::move(tensor), initialized), nullptr);
}

Parameter ModuleBase::bind_slot(const std::string& name, at::Tensor& member) {
  member = member.detach().requires_grad_(member.requires_grad() || member.is_floating_point());
  return add_slot(name, std::make_shared<ParameterSlot>(member, !member.is_meta()), &member);
}

Parameter ModuleBase::register_buffer_slot(const std::string& name, at::IntArrayRef sizes) {
  auto slot = std::make_shared<ParameterSlot>(uninitialised(sizes), false);
  buffer_slots_.emplace_back(name, slot);
  return Parameter(std::move(slot));
}

Parameter ModuleBase::add_slot(const std::string& name, SlotPtr slot, at::Tensor* member) {
  register_parameter(name, slot->get(), slot->get().requires_grad());
  slot->add_owner(this, name);
  Parameter parameter(slot);
  bindings_.push_back({parameter.slot_, member});
  slots_.emplace_back(name, std::move(slot));
  return parameter;
}

void ModuleBase::swap_parameter(const std::string& name, const at::Tensor& tensor) {
  parameters_[name] = tensor;
  if (at::Tensor* member = bindings_[index_of(name)].member) *member = tensor;
}

void ModuleBase::checkpoint_calls(CheckpointOptions options) {
  TESSERA_CHECK(!checkpoints_calls(), "activation checkpointing was applied to this ", name(),
                " already; apply it once to each module");
  TESSERA_CHECK(dynamic_cast<const ModuleList*>(this) == nullptr,
                "activation checkpointing of a ModuleList was asked for, which has no forward; "
                "apply it to the modules in it");
  checkpointed_.reset(new Checkpointed{std::move(options), std::exchange(hooks_, {})});
}

// By index: a hook may add hooks.
void ModuleBase::run_hooks(const std::vector<Hook>& hooks, TensorList tensors) {
  for (std::size_t i = 0; i < hooks.size(); ++i) hooks[i](*this, tensors);
}

void ModuleBase::run_always_hooks(const Hooks& hooks) noexcept {
  for (std::size_t i = 0; i < hooks.always.size(); ++i) hooks.always[i]();
}

}  // namespace tessera::nn
