// The base class of modules with parameter slots (ParameterSlot) and hooks. FSDP and tensor
// parallelism replace the tensors of slots; ModuleBase then updates libtorch's parameter table.

#include "tessera/nn/module.h"

#include <ATen/ops/empty.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <typeinfo>
#include <unordered_set>

#include "tessera/nn/detail/adopted_module.h"
#include "tessera/nn/detail/slots.h"
#include "tessera/nn/initialization.h"

namespace tessera::nn {

// The order of the visited modules is fixed, because a caller can run a collective for each module.

namespace {

void walk_below(torch::nn::Module& module, const std::string& fqn,
                const detail::ModuleVisitor& visit, const detail::ModuleWalk& walk,
                std::unordered_set<const torch::nn::Module*>& seen) {
  // By default, a shared module is visited once, under the first FQN that leads to the module.
  if ((walk.skip && walk.skip(module)) || (!walk.every_place && !seen.insert(&module).second)) {
    return;
  }
  if (!walk.children_first) {
    visit(fqn, module);
  }
  for (const auto& child : module.named_children()) {
    walk_below(*child.value(), detail::join_fqn(fqn, child.key()), visit, walk, seen);
  }
  if (walk.children_first) {
    visit(fqn, module);
  }
}

}  // namespace

void detail::walk_modules(torch::nn::Module& root, const ModuleVisitor& visit,
                          const ModuleWalk& walk) {
  std::unordered_set<const torch::nn::Module*> seen;
  walk_below(root, "", visit, walk, seen);
}

std::string detail::join_fqn(const std::string& parent, const std::string& name) {
  return parent.empty() ? name : parent + "." + name;
}

namespace {

struct Unfilled {
  std::vector<std::string> names;
  bool on_meta = false;

  void add(const NamedSlots& slots) {
    for (const auto& [name, slot] : slots) {
      if (!slot->initialized()) {
        names.push_back(name);
        on_meta = on_meta || slot->persistent().is_meta();
      }
    }
  }
};

}  // namespace

std::string first_of(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < 3; ++i) {
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  }
  return names.size() > 3 ? text + ", ..." : text;
}

void refuse_meta_buffers(const ModuleBase& module, const std::string& caller) {
  for (const auto& buffer : module.named_buffers()) {
    TESSERA_CHECK(!buffer.value().is_meta(), caller, ": buffer '", buffer.key(),
                  "' is on the meta device and cannot be replaced; use register_buffer_slot");
  }
}

void check_filled(const ModuleBase& module, const std::string& caller, const std::string& remedy) {
  Unfilled unfilled;
  unfilled.add(module.named_slots());
  unfilled.add(module.named_buffer_slots());
  TESSERA_CHECK(!unfilled.on_meta, caller, ": ", unfilled.names.size(),
                " parameters or buffers were never filled (", first_of(unfilled.names),
                "), and some are on the meta device, without storage; call nn::to_empty, then "
                "nn::init_weights, or load a checkpoint");
  TESSERA_CHECK(unfilled.names.empty(), caller, ": the storage of ", unfilled.names.size(),
                " parameters or buffers was never filled (", first_of(unfilled.names), "); ",
                remedy);
  refuse_meta_buffers(module, caller);
}

void check_initialized(const ModuleBase& module, const std::string& caller) {
  check_filled(module, caller,
               "call nn::init_weights, load a checkpoint, or fill them in reset_parameters");
}

namespace {

/// Advice for the error message if forward used a meta tensor. The tensor is no parameter or
/// buffer: the outermost call has checked all parameters and buffers.
constexpr const char* kKeptFromConstructor =
    "; the module kept a meta tensor from its constructor, which nn::to_empty did not replace: "
    "keep "
    "the nn::Parameter or the slot, and read its tensor in forward";

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

NamedTensors buffers_of(const ModuleBase& root) {
  NamedTensors buffers;
  for (const auto& [fqn, slot] : root.named_buffer_slots()) {
    buffers.emplace_back(fqn, slot->get());
  }
  for (const auto& item : root.named_buffers()) {
    buffers.emplace_back(item.key(), item.value());
  }
  return buffers;
}

bool is_around(const std::string& buffer, const std::string& module) {
  const std::size_t dot = buffer.rfind('.');
  return dot == std::string::npos || (module + ".").starts_with(buffer.substr(0, dot + 1));
}

/// Whether a message contains "meta" other than in "metadata".
bool names_meta(const std::string& message) {
  std::size_t at = message.find("meta");
  while (at != std::string::npos && message.compare(at, 8, "metadata") == 0) {
    at = message.find("meta", at + 1);
  }
  return at != std::string::npos;
}

/// Returns advice for an error that libtorch threw in the module `fqn`, or "". There is advice for
/// meta tensors, and for buffers that need a cast: mixed precision does not cast buffers.
std::string hint_for(const c10::Error& error, const ModuleBase& root, const std::string& fqn) {
  if (names_meta(error.msg())) {
    return kKeptFromConstructor;
  }
  if (error.msg().find("type") == std::string::npos) {
    return "";
  }
  const NamedSlots slots = root.named_slots();
  for (const auto& [name, buffer] : buffers_of(root)) {
    if (!buffer.defined() || !buffer.is_floating_point() || !is_around(name, fqn)) {
      continue;
    }
    const auto other = std::ranges::find_if(slots, [type = buffer.scalar_type()](auto& slot) {
      const at::Tensor& parameter = slot.second->get();
      return parameter.is_floating_point() && parameter.scalar_type() != type;
    });
    if (other != slots.end()) {
      return tessera::detail::concat(
          "; buffer '", name, "' is of type ", buffer.scalar_type(), ", and parameters are ",
          other->second->get().scalar_type(),
          ", perhaps by mixed precision: cast the buffer in forward, buffer.to(x.scalar_type()), "
          "or make its module (for example an adopted libtorch module) a separate FSDP unit whose "
          "mp_policy has param_dtype = at::k",
          buffer.scalar_type(), " and restore_input_dtype = true");
    }
  }
  return "";
}

thread_local const detail::RunningCall* call_of_thread = nullptr;

/// An Error whose message already has the name of the module in which the Error was thrown.
class ErrorInModule final : public Error {
 public:
  using Error::Error;
};

at::Tensor uninitialised(at::IntArrayRef sizes) {
  const c10::Device device = tessera::detail::makes_meta_tensors() ? c10::kMeta : c10::kCPU;
  return at::empty(sizes, at::dtype(c10::get_default_dtype_as_scalartype()).device(device));
}

/// Throws Error if a module that is not a ModuleBase has parameters, because tensor parallelism and
/// FSDP cannot replace such parameters.
void check_has_no_parameters(const std::string& fqn, const torch::nn::Module& module) {
  const auto own = module.named_parameters(/*recurse=*/false);
  TESSERA_CHECK(own.is_empty(), "parameter '", detail::join_fqn(fqn, own.front().key()), "' of a ",
                module.name(),
                " has no slot; hold the module in nn::Hooked, or derive it from nn::Module");
}

/// Throws Error if FSDP has gathered a parameter: a type conversion would then convert only the
/// unsharded tensor, not FSDP's shard.
void check_not_gathered(const ModuleBase& root) {
  visit_modules(root, [](const std::string&, const ModuleBase& module) {
    for (const auto& [name, slot] : module.slots()) {
      TESSERA_CHECK(!slot->role.gathered, "conversion of a ", module.name(),
                    " was called, but FSDP has gathered its parameter '", name,
                    "'; convert before forward or after backward, or call fsdp::reshard first");
    }
  });
}

}  // namespace

/// Removes this module from the owners of its ParameterSlots, because the ParameterSlot of a tied
/// parameter can outlive this module.
ModuleBase::~ModuleBase() {
  for (const auto& [name, slot] : slots_) {
    slot->remove_owner(this, name);
  }
}

/// Returns the slots of this module and of all modules below. `own`: the member with the slots of
/// parameters or with the slots of buffers.
NamedSlots ModuleBase::collect_slots(const NamedSlots ModuleBase::*own) const {
  NamedSlots found;
  std::unordered_set<const ParameterSlot*> seen;
  // Modules that are not a ModuleBase are visited only to check that they have no parameters.
  visit_modules(*this, [&](const std::string& fqn, const torch::nn::Module& module) {
    const auto* base = dynamic_cast<const ModuleBase*>(&module);
    if (base == nullptr) {
      check_has_no_parameters(fqn, module);
      return;
    }
    base->check_slots(fqn);
    base->note_fqn(fqn);
    for (const auto& [name, slot] : base->*own) {
      if (seen.insert(slot.get()).second) {
        found.emplace_back(detail::join_fqn(fqn, name), slot);
      }
    }
  });
  return found;
}

NamedSlots ModuleBase::named_slots() const {
  NamedSlots found = collect_slots(&ModuleBase::slots_);
  named_tree_ = true;
  for (const auto& [fqn, slot] : found) {
    slot->set_fqn(fqn);
  }
  return found;
}

NamedSlots ModuleBase::named_buffer_slots() const {
  return collect_slots(&ModuleBase::buffer_slots_);
}

void ModuleBase::note_fqn(const std::string& fqn) const {
  if (!fqn_ || fqn.size() > fqn_->size()) {
    fqn_ = fqn;
  }
}

/// Sets the FQNs of all modules below this module. Must be called on the root module, because an
/// FQN is relative to the root.
void ModuleBase::note_names_of_tree() const {
  if (!named_tree_) {
    named_slots();
  }
}

/// Whether this module has an FQN. First sets FQNs if this module has none: this module may have
/// been registered after other modules got their FQNs.
bool ModuleBase::is_in_a_tree() const {
  if (!fqn_ && call_of_thread != nullptr) {
    call_of_thread->outermost->named_slots();
  }
  return fqn_.has_value();
}

/// Throws Error if this module is trainable, but is not registered below the outermost called
/// module. A frozen module, such as a teacher, need not be registered.
void ModuleBase::check_in_a_tree() const {
  if (is_in_a_tree()) {
    return;
  }
  const bool trained = std::ranges::any_of(
      slots_, [](const auto& slot) { return slot.second->persistent().requires_grad(); });
  TESSERA_CHECK(!trained, "a ", name(), " with parameters was called in the forward of a ",
                call_of_thread->outermost->name(),
                ", but is not registered, so its parameters are not filled, trained, sharded or "
                "saved: pass it to register_module; to keep it separate, freeze it (nn::freeze) or "
                "call nn::init_weights on it");
  check_initialized(*this, "forward of a " + name());  // check_initialized() also sets FQNs
}

/// Throws Error for a parameter that the program registered by libtorch's register_parameter, and
/// that therefore has no ParameterSlot.
void ModuleBase::check_slots(const std::string& fqn) const {
  if (parameters_.size() == slots_.size()) {
    return;
  }
  for (const auto& parameter : named_parameters(/*recurse=*/false)) {
    const bool known = std::ranges::any_of(
        slots_, [&](const auto& slot) { return slot.first == parameter.key(); });
    TESSERA_CHECK(known, "parameter '", detail::join_fqn(fqn, parameter.key()), "' of a ", name(),
                  " has no slot, so optimizers, checkpoints and sharding would miss it; use "
                  "register_slot instead of register_parameter");
  }
}

std::size_t ModuleBase::index_of(const std::string& name) const {
  const auto found = std::ranges::find(slots_, name, &decltype(slots_)::value_type::first);
  if (found != slots_.end()) {
    return static_cast<std::size_t>(found - slots_.begin());
  }
  std::string known;
  for (const auto& slot : slots_) {
    known += (known.empty() ? "" : ", ") + slot.first;
  }
  fail("parameter '", name, "' of a ", this->name(),
       " does not exist; its parameters are: ", known.empty() ? "none" : known);
}

const SlotPtr& ModuleBase::slot(const std::string& name) const {
  return slots_[index_of(name)].second;
}

void ModuleBase::tie_slot(const std::string& name, const SlotPtr& slot) {
  const std::size_t index = index_of(name);
  SlotPtr& current = slots_[index].second;
  if (current == slot) {
    return;
  }
  // The tensors of the two tied parameters can have different types and placements. From now on
  // both modules use the tensor in `slot`.
  TESSERA_CHECK(current->get().sizes() == slot->get().sizes(), "parameter '", name, "' of sizes ",
                current->get().sizes(), " can't be tied to a parameter of sizes ",
                slot->get().sizes(), "; tie parameters of equal sizes");
  current->remove_owner(this, name);
  current = slot;
  // An nn::Parameter member of the derived class shares this handle, and so reads the tensor of
  // `slot` from now on.
  *bindings_[index].handle = slot;
  slot->add_owner(this, name);
  swap_parameter(name, slot->get());
}

void ModuleBase::reset_parameters(const InitContext&) {}

void ModuleBase::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  check_not_gathered(*this);
  // libtorch's Module::to() converts parameters in place, but does not convert buffers that were
  // registered by register_buffer_slot().
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
    slot->swap(buffer.to(
        device.value_or(buffer.device()),
        buffer.is_floating_point() ? dtype.value_or(buffer.scalar_type()) : buffer.scalar_type(),
        non_blocking));
  }
}

Parameter ModuleBase::register_slot(const std::string& name, at::IntArrayRef sizes) {
  at::Tensor tensor = uninitialised(sizes).requires_grad_();
  return add_slot(name, std::make_shared<ParameterSlot>(std::move(tensor), false), {});
}

Parameter ModuleBase::register_slot(const std::string& name, at::Tensor tensor) {
  const bool initialized = !tensor.is_meta();
  // A parameter must be a leaf, even if the caller computed `tensor` from other tensors.
  tensor = tensor.detach().requires_grad_(tensor.is_floating_point() || tensor.is_complex());
  return add_slot(name, std::make_shared<ParameterSlot>(std::move(tensor), initialized), {});
}

Parameter ModuleBase::register_buffer_slot(const std::string& name, at::IntArrayRef sizes,
                                           bool persistent) {
  // The buffer is not registered with libtorch, because libtorch would save the buffer in
  // checkpoints and would not see replacements of the tensor.
  auto slot = std::make_shared<ParameterSlot>(uninitialised(sizes), false);
  slot->role.saved = persistent;
  buffer_slots_.emplace_back(name, slot);
  return Parameter(std::move(slot));
}

Parameter ModuleBase::add_slot(const std::string& name, SlotPtr slot, Follow follow) {
  // libtorch gets the parameter as well, for Module::parameters() and torch::optim.
  register_parameter(name, slot->get(), slot->get().requires_grad());
  slot->add_owner(this, name);
  Parameter parameter(slot);
  bindings_.push_back({parameter.slot_, std::move(follow)});
  slots_.emplace_back(name, std::move(slot));
  return parameter;
}

void ModuleBase::swap_parameter(const std::string& name, const at::Tensor& tensor) {
  // Writes to libtorch's parameter table, because register_parameter refuses an existing name.
  parameters_[name] = tensor;
  if (const Follow& follow = bindings_[index_of(name)].follow) {
    follow(tensor);
  }
}

void ModuleBase::add_forward_pre_hook(Hook hook, HookedCalls calls) {
  if (calls == HookedCalls::kEveryMethod) {
    method_hooks_.before.push_back(hook);
  }
  hooks_.before.push_back(std::move(hook));
}

void ModuleBase::add_forward_hook(Hook hook, HookedCalls calls) {
  if (calls == HookedCalls::kEveryMethod) {
    method_hooks_.after.push_back(hook);
  }
  hooks_.after.push_back(std::move(hook));
}

void ModuleBase::add_always_hook(std::function<void()> hook, HookedCalls calls) {
  if (calls == HookedCalls::kEveryMethod) {
    method_hooks_.always.push_back(hook);
  }
  hooks_.always.push_back(std::move(hook));
}

void ModuleBase::checkpoint_calls(CheckpointOptions options) {
  TESSERA_CHECK(!checkpoints_calls(), "activation checkpointing was applied to this ", name(),
                " already; apply it once to each module");
  TESSERA_CHECK(dynamic_cast<const ModuleList*>(this) == nullptr,
                "activation checkpointing was applied to a ModuleList, which has no forward; apply "
                "it to the modules in the list");
  // Hooks that were added before this call belong to the checkpointed function, so the
  // recomputation runs these hooks again. Later hooks (FSDP's) run once, outside of the function.
  checkpointed_ =
      std::make_unique<Checkpointed>(Checkpointed{std::move(options), std::exchange(hooks_, {})});
}

void ModuleBase::check_called() const {
  TESSERA_CHECK(running_calls_ > 0 || (hooks_.before.empty() && hooks_.after.empty()),
                "forward of a ", name(), " was called as m.forward(x), which skips the ",
                "module's hooks; call m(x), or (*m)(x) for a pointer");
}

bool ModuleBase::has_meta(TensorList tensors) {
  return std::ranges::any_of(
      tensors, [](const at::Tensor* tensor) { return tensor->defined() && tensor->is_meta(); });
}

void ModuleBase::check_meta_inputs(TensorList inputs) const {
  TESSERA_CHECK(has_meta(inputs), "forward of a ", name(), " returned a tensor on the meta device",
                kKeptFromConstructor);
}

void ModuleBase::rethrow_named() const {
  // The error message must be made in the exception handler, while the CallScope still exists.
  const auto context = [this] {
    const std::string fqn = fqn_.value_or("");
    std::string text =
        tessera::detail::concat("in module ", fqn.empty() ? "" : "'" + fqn + "', a ", name());
    for (const auto* call = call_of_thread; call != nullptr; call = call->outer) {
      if (const auto unit = call->module->attached<detail::CallContext>()) {
        return text + ", in " + unit->text();
      }
    }
    return text;
  };
  try {
    throw;
  } catch (c10::Error& error) {
    // An error message names only the innermost module, because the names of all outer modules
    // would make the message several lines long.
    if (error.context().empty()) {
      error.add_context(context() + hint_for(error, *call_of_thread->outermost, fqn_.value_or("")));
    }
    throw;
  } catch (const Error& error) {
    // Only Error itself gets the module's name. A derived class has a name already or needs none.
    if (typeid(error) != typeid(Error)) {
      throw;
    }
    throw ErrorInModule(std::string(error.what()) + " (" + context() + ")");
  }
}

// Only the outermost module call checks that all parameters are initialized. The check is skipped
// if fill_epoch() is unchanged, so in most calls the check is one comparison.
ModuleBase::CallScope::CallScope(ModuleBase& module)
    : call_{.module = &module, .outer = call_of_thread, .outermost = &module} {
  // ParameterSlots are checked in every call, because a parameter can be registered at any time.
  module.check_slots("");
  if (call_.outer != nullptr) {
    call_.outermost = call_.outer->outermost;
    if (!module.fqn_ && !module.slots_.empty()) [[unlikely]] {
      module.check_in_a_tree();
    }
  } else {
    const std::uint64_t epoch = detail::fill_epoch();
    if (module.checked_epoch_ != epoch) {
      check_initialized(module, "forward of a " + module.name());
      module.checked_epoch_ = epoch;
    }
    module.note_names_of_tree();
  }
  call_of_thread = &call_;
}

ModuleBase::CallScope::~CallScope() {
  call_of_thread = call_.outer;
}

const ModuleBase* detail::outermost_call() {
  return call_of_thread == nullptr ? nullptr : call_of_thread->outermost;
}

// A hook can add hooks, which invalidates iterators, so the loop uses an index.
void ModuleBase::run_hooks(const std::vector<Hook>& hooks, TensorList tensors) {
  for (std::size_t i = 0; i < hooks.size(); ++i) {
    hooks[i](*this, tensors);
  }
}

void ModuleBase::run_always_hooks(const Hooks& hooks) noexcept {
  for (std::size_t i = hooks.always.size(); i-- > 0;) {
    hooks.always[i]();
  }
}

// Activation checkpointing of modules: the policies that select operators, and the selection of
// modules.

OperatorPolicy save_operators(std::vector<std::string> names) {
  return [names = std::move(names)](const OperatorCall& call) {
    return std::ranges::find(names, call.name) != names.end();
  };
}

OperatorPolicy save_matmuls_and_attention() {
  // Operators that do much computation for each byte of their results.
  return save_operators(
      {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "tessera::fp8_linear",
       "aten::convolution", "aten::_scaled_dot_product_flash_attention",
       "aten::_scaled_dot_product_flash_attention_for_cpu",
       "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
       "aten::_flash_attention_forward", "aten::_efficient_attention_forward",
       "tessera::chunked_attention", "tessera::grouped_linear", "tessera::all_to_all_uneven"});
}

ModulePredicate named(std::string pattern) {
  return [pattern = std::move(pattern)](const std::string& fqn, const ModuleBase&) {
    return matches_fqn(pattern, fqn);
  };
}

std::vector<std::string> apply_activation_checkpointing(ModuleBase& root,
                                                        const ModulePredicate& select,
                                                        const CheckpointOptions& options) {
  std::vector<std::pair<std::string, ModuleBase*>> selected;
  // Visits a shared module under each of its FQNs, because a pattern can match any of the FQNs.
  visit_modules(root,
                [&](const std::string& fqn, ModuleBase& module) {
                  if (select(fqn, module)) {
                    selected.emplace_back(fqn, &module);
                  }
                },
                {.every_place = true});
  TESSERA_CHECK(!selected.empty(), "activation checkpointing selects no module of this ",
                root.name(), "; correct the pattern or the class");
  std::vector<std::string> applied;
  for (const auto& [fqn, module] : selected) {
    // Skips a module that is already checkpointed, perhaps under another FQN.
    if (module->checkpoints_calls()) {
      continue;
    }
    TESSERA_CHECK(dynamic_cast<const AdoptedModule*>(module) == nullptr,
                  "activation checkpointing selects '", fqn, "', a ", module->name(),
                  " inside a module that nn::Hooked holds, which runs without hooks; select the "
                  "module that nn::Hooked holds");
    module->checkpoint_calls(options);
    applied.push_back(fqn);
  }
  return applied;
}

}  // namespace tessera::nn
