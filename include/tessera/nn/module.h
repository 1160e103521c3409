#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeindex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/visit_tensors.h"

namespace tessera::nn {

class InitContext;

/// The tensors inside a call's arguments or result, in order; a hook may replace them in place.
/// Tensors that the caller left undefined are there too.
using TensorList = std::span<at::Tensor* const>;
using Hook = std::function<void(ModuleBase& module, TensorList tensors)>;
using NamedSlots = std::vector<std::pair<std::string, SlotPtr>>;

/// What a torch::nn::Module lacks: hooks around forward, and parameters that can be swapped.
///
/// A module is not copyable: its slots know it. Build a second one and copy the values over.
class ModuleBase : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
  ModuleBase(const ModuleBase&) = delete;
  ModuleBase& operator=(const ModuleBase&) = delete;
  ~ModuleBase() override;

  /// Runs before forward with the tensors of its arguments, in order of registration.
  void add_forward_pre_hook(Hook hook) { hooks_.before.push_back(std::move(hook)); }
  /// Runs after forward with the tensors of its result, in order of registration.
  void add_forward_hook(Hook hook) { hooks_.after.push_back(std::move(hook)); }
  /// Runs last even if forward or a hook throws; must not throw itself.
  void add_always_hook(std::function<void()> hook) { hooks_.always.push_back(std::move(hook)); }

  /// From now on every call is a checkpoint() of forward and the hooks that are there by now; hooks
  /// that come later (FSDP's) are around it and run once. Throws Error if it was said before.
  void checkpoint_calls(CheckpointOptions options);
  bool checkpoints_calls() const { return checkpointed_ != nullptr; }

  /// This module's own parameters, by name, in order of registration.
  const NamedSlots& slots() const { return slots_; }
  /// This module's own buffers.
  const NamedSlots& buffer_slots() const { return buffer_slots_; }
  /// Parameters of this module and all below it, each once, with the first FQN that leads to it.
  /// Throws Error for a module below that has parameters but no slots (hold it in nn::Hooked).
  NamedSlots named_slots() const;
  /// Buffers of this module and all below it.
  NamedSlots named_buffer_slots() const;
  /// The slot of an own parameter. Throws Error, listing the names, if there is none.
  const SlotPtr& slot(const std::string& name) const;
  /// Replaces the parameter `name` by `slot`, which both then share (tied weights).
  void tie_slot(const std::string& name, const SlotPtr& slot);

  /// Fills own parameters and buffers (not children's) with their initial values. Called by
  /// init_weights on every module, parents first, on the final (sharded) tensors. A module may also
  /// fill what lies below it; a parameter is filled once, by the outermost module that asks to.
  virtual void reset_parameters(const InitContext& init);

  /// Keeps an object of a layer above with this module, one per type (FSDP keeps its unit so).
  template <class T>
  void attach(std::shared_ptr<T> object) {
    attached_[typeid(T)] = std::move(object);
  }
  /// What was attached as a T, or nullptr.
  template <class T>
  std::shared_ptr<T> attached() const {
    const auto found = attached_.find(typeid(T));
    return found == attached_.end() ? nullptr : std::static_pointer_cast<T>(found->second);
  }

  /// As libtorch's; of buffers, only floating-point ones change their type. Throws Error, before
  /// anything is changed, for a parameter that FSDP has gathered: its shards would stay behind.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  /// Not supported: always throws Error.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

 protected:
  /// A parameter of these sizes: uninitialised, on the device of the active MetaDevice scope.
  Parameter register_slot(const std::string& name, at::IntArrayRef sizes);
  /// A parameter that starts as `tensor`.
  Parameter register_slot(const std::string& name, at::Tensor tensor);
  /// Makes a slot of a tensor member, which then follows every swap:
  ///   weight = at::empty({4, 8}); bind_slot("weight", weight);
  Parameter bind_slot(const std::string& name, at::Tensor& member);
  /// A buffer: moves with the module and is re-made by reset_parameters, but is not saved.
  Parameter register_buffer_slot(const std::string& name, at::IntArrayRef sizes);

  struct Hooks {
    std::vector<Hook> before;
    std::vector<Hook> after;
    std::vector<std::function<void()>> always;
  };
  /// Those outside of what is checkpointed, and those within.
  Hooks& hooks() { return hooks_; }
  Hooks& checkpointed_hooks() { return checkpointed_->hooks; }
  const CheckpointOptions& checkpoint_options() const { return checkpointed_->options; }
  void run_hooks(const std::vector<Hook>& hooks, TensorList tensors);
  static void run_always_hooks(const Hooks& hooks) noexcept;

 private:
  friend class ParameterSlot;
  /// What follows a swap beside the slot: the handles of a parameter, a member bound to it.
  struct Binding {
    std::shared_ptr<SlotPtr> handle;
    at::Tensor* member = nullptr;
  };

  struct Checkpointed {
    CheckpointOptions options;
    Hooks hooks;
  };

  void convert_buffers(std::optional<torch::Device> device, std::optional<torch::Dtype> dtype,
                       bool non_blocking);
  Parameter add_slot(const std::string& name, SlotPtr slot, at::Tensor* member);
  void swap_parameter(const std::string& name, const at::Tensor& tensor);
  std::size_t index_of(const std::string& name) const;

  NamedSlots slots_;
  std::vector<Binding> bindings_;  // beside slots_
  NamedSlots buffer_slots_;
  Hooks hooks_;
  std::unique_ptr<Checkpointed> checkpointed_;
  std::unordered_map<std::type_index, std::shared_ptr<void>> attached_;
};

/// Base of a user's module. Call it as module(args...): pre-hooks, Derived::forward(args...),
/// hooks. Arguments (copied) and results may be anything that visit_tensors knows. forward may
/// return void.
template <class Derived>
class Module : public ModuleBase {
 public:
  using ModuleBase::ModuleBase;

  template <class... Args>
  auto operator()(Args&&... args) {
    std::tuple<std::decay_t<Args>...> arguments(std::forward<Args>(args)...);
    const auto body = [this](auto&... values) { return this->call_forward(values...); };
    if (!checkpoints_calls()) return call_hooked(hooks(), body, arguments);
    return call_hooked(
        hooks(), [this](auto&... values) { return this->call_checkpointed(values...); }, arguments);
  }

 private:
  template <class... Values>
  auto call_forward(Values&... values) {
    return static_cast<Derived*>(this)->forward(values...);
  }

  template <class... Values>
  auto call_checkpointed(Values&... values) {
    // The graph may outlive the last handle of a module that somebody shares.
    const auto region = [this, alive = this->weak_from_this().lock()](auto&... inputs) {
      const auto body = [this](auto&... arguments) { return this->call_forward(arguments...); };
      auto arguments = std::tie(inputs...);
      return this->call_hooked(this->checkpointed_hooks(), body, arguments);
    };
    if constexpr ((std::is_copy_constructible_v<Values> && ...)) {
      return checkpoint(checkpoint_options(), region, values...);
    } else {
      fail("activation checkpointing of a ", name(), " keeps a copy of its arguments, but one of ",
           "them can't be copied; pass it by reference or pointer");
      return region(values...);
    }
  }

  template <class F, class Tuple>
  auto call_hooked(Hooks& hooks, const F& body, Tuple& arguments) {
    struct Finally {
      Hooks& hooks;
      ~Finally() { run_always_hooks(hooks); }
    } finally{hooks};
    if (!hooks.before.empty()) this->run_hooks(hooks.before, collect_tensors(arguments));
    if constexpr (std::is_void_v<decltype(std::apply(body, arguments))>) {
      std::apply(body, arguments);
      this->run_hooks(hooks.after, {});
    } else {
      auto result = std::apply(body, arguments);
      if (!hooks.after.empty()) this->run_hooks(hooks.after, collect_tensors(result));
      return result;
    }
  }
};

}  // namespace tessera::nn
