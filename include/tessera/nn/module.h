#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/nn/parameter.h"
#include "tessera/nn/visit_tensors.h"

namespace tessera::nn {

/// The tensors inside a call's arguments or result; a hook may replace them in place.
using TensorList = std::span<at::Tensor* const>;
using Hook = std::function<void(ModuleBase& module, TensorList tensors)>;

/// What a torch::nn::Module lacks: hooks around forward, and parameters that can be swapped.
class ModuleBase : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
  ~ModuleBase() override;

  /// Runs before forward with the tensors of its arguments, in order of registration.
  void add_forward_pre_hook(Hook hook) { pre_hooks_.push_back(std::move(hook)); }
  /// Runs after forward with the tensors of its result, in order of registration.
  void add_forward_hook(Hook hook) { post_hooks_.push_back(std::move(hook)); }
  /// Runs last even if forward or a hook throws.
  void add_always_hook(std::function<void()> hook) { always_hooks_.push_back(std::move(hook)); }

  /// This module's own slots, by name, in order of registration.
  const std::vector<std::pair<std::string, SlotPtr>>& slots() const { return slots_; }
  /// Slots of this module and all below it, each once, with the first FQN that leads to it.
  std::vector<std::pair<std::string, SlotPtr>> named_slots() const;
  /// Replaces the slot `name` by `slot`, which both then share (tied weights).
  void tie_slot(const std::string& name, const SlotPtr& slot);

  /// Fills own parameters and buffers (not children's) with their initial values. Called by
  /// nn::init_weights on every module, after to_empty, on the final (sharded) tensors.
  virtual void reset_parameters() {}

 protected:
  /// A parameter of these sizes: uninitialised, on the device of the active MetaDevice scope.
  Parameter register_slot(const std::string& name, at::IntArrayRef sizes);
  Parameter register_slot(const std::string& name, at::Tensor tensor);

  void run_pre_hooks(TensorList tensors);
  void run_post_hooks(TensorList tensors);
  void run_always_hooks() noexcept;

 private:
  friend class ParameterSlot;
  void swap_parameter(const std::string& name, const at::Tensor& tensor);

  std::vector<std::pair<std::string, SlotPtr>> slots_;
  std::vector<Hook> pre_hooks_;
  std::vector<Hook> post_hooks_;
  std::vector<std::function<void()>> always_hooks_;
};

/// Base of a user's module. Call it as module(args...): pre-hooks, Derived::forward(args...), hooks.
/// Arguments and results may be anything that visit_tensors knows: tensors inside tuples, pairs,
/// vectors, arrays, optionals; for a struct of yours, overload visit_tensors beside it.
template <class Derived>
class Module : public ModuleBase {
 public:
  using ModuleBase::ModuleBase;

  template <class... Args>
  auto operator()(Args&&... args) {
    std::tuple<std::decay_t<Args>...> arguments(std::forward<Args>(args)...);
    struct Finally {
      ModuleBase& module;
      ~Finally() { static_cast<Module&>(module).run_always_hooks(); }
    } finally{*this};
    run_pre_hooks(collect_tensors(arguments));
    auto result = std::apply(
        [this](auto&... values) { return static_cast<Derived*>(this)->forward(values...); },
        arguments);
    run_post_hooks(collect_tensors(result));
    return result;
  }
};

/// While it lives, on this thread, factory functions and new parameters make meta tensors.
class MetaDevice {
 public:
  MetaDevice();
  ~MetaDevice();
  MetaDevice(const MetaDevice&) = delete;
  MetaDevice& operator=(const MetaDevice&) = delete;
};

/// Gives every meta parameter and buffer below `module` real, uninitialised storage on `device`,
/// keeping layout and requires_grad. Reading one that init_weights or a load has not filled since
/// is an error (see check_initialized).
void to_empty(ModuleBase& module, c10::Device device);
/// Calls reset_parameters() of every module below, parents first, each parameter filled once, with
/// random streams keyed by `seed` and the parameter's FQN: bit-equal on every mesh.
void init_weights(ModuleBase& module, std::uint64_t seed);
/// Throws Error naming the first parameters or buffers that to_empty made and nobody filled.
void check_initialized(const ModuleBase& module);
void mark_initialized(const SlotPtr& slot);

}  // namespace tessera::nn
