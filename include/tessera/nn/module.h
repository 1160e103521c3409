#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeindex>
#include <unordered_map>
#include <utility>
#include <vector>

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
  void add_forward_pre_hook(Hook hook) { pre_hooks_.push_back(std::move(hook)); }
  /// Runs after forward with the tensors of its result, in order of registration.
  void add_forward_hook(Hook hook) { post_hooks_.push_back(std::move(hook)); }
  /// Runs last even if forward or a hook throws; must not throw itself.
  void add_always_hook(std::function<void()> hook) { always_hooks_.push_back(std::move(hook)); }

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

  void run_pre_hooks(TensorList tensors);
  void run_post_hooks(TensorList tensors);
  void run_always_hooks() noexcept;
  bool has_pre_hooks() const { return !pre_hooks_.empty(); }
  bool has_post_hooks() const { return !post_hooks_.empty(); }

 private:
  friend class ParameterSlot;
  /// What follows a swap beside the slot: the handles of a parameter, a member bound to it.
  struct Binding {
    std::shared_ptr<SlotPtr> handle;
    at::Tensor* member = nullptr;
  };

  Parameter add_slot(const std::string& name, SlotPtr slot, at::Tensor* member);
  void swap_parameter(const std::string& name, const at::Tensor& tensor);
  std::size_t index_of(const std::string& name) const;

  NamedSlots slots_;
  std::vector<Binding> bindings_;  // beside slots_
  NamedSlots buffer_slots_;
  std::vector<Hook> pre_hooks_;
  std::vector<Hook> post_hooks_;
  std::vector<std::function<void()>> always_hooks_;
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
    struct Finally {
      Module& module;
      ~Finally() { module.run_always_hooks(); }
    } finally{*this};
    if (has_pre_hooks()) run_pre_hooks(collect_tensors(arguments));
    const auto call = [this](auto&... values) {
      return static_cast<Derived*>(this)->forward(values...);
    };
    if constexpr (std::is_void_v<decltype(std::apply(call, arguments))>) {
      std::apply(call, arguments);
      run_post_hooks({});
    } else {
      auto result = std::apply(call, arguments);
      if (has_post_hooks()) run_post_hooks(collect_tensors(result));
      return result;
    }
  }
};

}  // namespace tessera::nn
