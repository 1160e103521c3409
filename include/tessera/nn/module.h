#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeindex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/core/detail/no_copy.h"
#include "tessera/core/error.h"
#include "tessera/export.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/detail/records.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/visit_tensors.h"

TESSERA_API_BEGIN
namespace tessera::nn {

class AdoptedModule;
class InitContext;
template <class Derived>
class Module;

namespace detail {

// HasForward tests whether M has a member `forward` (also a template or overload). TwoForwards
// derives from M and OtherForward: if M has the member, TwoForwards::forward is ambiguous.
struct OtherForward {
  int forward;
};
template <class M>
struct TwoForwards : M, OtherForward {};
template <class M>
concept HasForward = std::is_final_v<M> || !requires { &TwoForwards<M>::forward; };

/// A module call in progress. Calls nest, so the calls of a thread form a linked list.
struct RunningCall {
  const ModuleBase* module = nullptr;
  const RunningCall* outer = nullptr;
  const ModuleBase* outermost = nullptr;
};

/// Objects that are attached to a module, at most one per type. For example, FSDP attaches an
/// object that represents the module's FSDP unit.
class Attachments {
 public:
  template <class T>
  void attach(std::shared_ptr<T> object) {
    attached_[typeid(T)] = std::move(object);
  }
  /// Returns the attached object of type T, or nullptr if no object of type T is attached.
  template <class T>
  std::shared_ptr<T> attached() const {
    const auto found = attached_.find(typeid(T));
    return found == attached_.end() ? nullptr : std::static_pointer_cast<T>(found->second);
  }

 private:
  std::unordered_map<std::type_index, std::shared_ptr<void>> attached_;
};

}  // namespace detail

/// The tensors in the arguments or the result of a call, in order, including undefined tensors. A
/// hook may replace each tensor.
using TensorList = std::span<at::Tensor* const>;
/// A function that receives the called module, and the tensors of the call's arguments or result.
using Hook = std::function<void(ModuleBase& module, TensorList tensors)>;
/// Pairs of a parameter's name (or FQN) and its ParameterSlot, in order of registration.
using NamedSlots = std::vector<std::pair<std::string, SlotPtr>>;

/// A torch::nn::Module with hooks around forward. FSDP and tensor parallelism can replace the
/// tensors in the parameter slots (ParameterSlot). Derive your own modules from Module<Derived>. A
/// module can't be copied. Thread safety: one thread at a time.
class ModuleBase : public torch::nn::Module, public detail::Attachments, tessera::detail::NoCopy {
 public:
  using torch::nn::Module::Module;
  ~ModuleBase() override;

  /// Adds a hook that runs before forward, with the tensors in forward's arguments. Hooks run in
  /// order of registration.
  void add_forward_pre_hook(Hook hook, HookedCalls calls = HookedCalls::kForward);
  /// Adds a hook that runs after forward, with the tensors in forward's result. Hooks run in order
  /// of registration.
  void add_forward_hook(Hook hook, HookedCalls calls = HookedCalls::kForward);
  /// Adds a hook that runs last, even if forward or another hook throws. These hooks run in reverse
  /// order of registration and must not throw.
  void add_always_hook(std::function<void()> hook, HookedCalls calls = HookedCalls::kForward);

  /// Makes every call of this module an activation checkpoint(). The recomputation also runs the
  /// hooks that were added before, not the hooks that are added later (FSDP's). Throws Error for a
  /// second checkpoint_calls().
  void checkpoint_calls(CheckpointOptions options);
  bool checkpoints_calls() const { return checkpointed_ != nullptr; }

  /// Returns this module's own parameters, by name, in order of registration.
  const NamedSlots& slots() const { return slots_; }
  /// Returns this module's own buffers, by name, in order of registration.
  const NamedSlots& buffer_slots() const { return buffer_slots_; }
  /// Returns the parameters of this module and of all modules below it, each once, with the first
  /// FQN. Throws Error for a parameter without a ParameterSlot (use register_slot or nn::Hooked).
  NamedSlots named_slots() const;
  /// Returns the buffers of this module and of modules below it, each once, with the first FQN.
  NamedSlots named_buffer_slots() const;
  /// Returns the FQN of this module in the outermost module on which named_slots() was called or
  /// whose call reached this module. Returns nullopt before the first such call.
  const std::optional<std::string>& fqn() const { return fqn_; }
  /// Returns the ParameterSlot of this module's own parameter `name`. Throws Error, with a list of
  /// the names, if there is no such parameter.
  const SlotPtr& slot(const std::string& name) const;
  /// Makes parameter `name` use `slot` of another module, so that both modules share one parameter
  /// (tied weights). Throws Error if the sizes differ.
  void tie_slot(const std::string& name, const SlotPtr& slot);

  /// Fills this module's parameters and buffers with initial values; init_weights() calls
  /// reset_parameters() of every module, parents first. A module may also fill parameters of its
  /// children; the outermost module determines the values.
  virtual void reset_parameters(const InitContext& init);

  /// Like to() of torch::nn::Module, but of the buffers only floating-point buffers change their
  /// type. Throws Error, before any change, if FSDP has gathered a parameter.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

 protected:
  /// Registers an uninitialized parameter with the given sizes. The parameter is on the meta device
  /// inside a MetaDevice scope, otherwise on the CPU.
  Parameter register_slot(const std::string& name, at::IntArrayRef sizes);
  /// Registers a parameter that shares the memory of `tensor`.
  Parameter register_slot(const std::string& name, at::Tensor tensor);
  /// Registers a buffer, which to() moves with the module. Saved checkpoints contain the buffer if
  /// `persistent` is true. A table that reset_parameters() computes need not be persistent.
  Parameter register_buffer_slot(const std::string& name, at::IntArrayRef sizes,
                                 bool persistent = true);

  /// Throws Error if forward was called as m.forward(x) instead of m(x), so that hooks have not
  /// run. For the first line of a forward.
  void check_called() const;

 private:
  friend class Dropout;
  friend class detail::SlotState;
  friend class AdoptedModule;
  template <class Derived>
  friend class tessera::nn::Module;

  struct Hooks {
    std::vector<Hook> before;
    std::vector<Hook> after;
    std::vector<std::function<void()>> always;
  };
  Hooks& hooks() { return hooks_; }
  Hooks& method_hooks() { return method_hooks_; }
  Hooks& checkpointed_hooks() { return checkpointed_->hooks; }
  const CheckpointOptions& checkpoint_options() const { return checkpointed_->options; }
  void run_hooks(const std::vector<Hook>& hooks, TensorList tensors);
  static void run_always_hooks(const Hooks& hooks) noexcept;

  /// Rethrows the current exception. Adds this module's name and FSDP unit to an Error or a
  /// libtorch exception, unless an inner module has added a name.
  [[noreturn]] void rethrow_named() const;
  /// Throws Error if forward returned a meta tensor but had no meta input: forward then used a meta
  /// tensor that the constructor did not register.
  void check_meta_inputs(TensorList inputs) const;
  static bool has_meta(TensorList tensors);
  /// Checks a module call. The outermost call throws Error for a parameter without a ParameterSlot
  /// and for an uninitialized parameter or buffer. An inner call throws Error if its module has
  /// trainable parameters and was never registered.
  class CallScope : tessera::detail::NoCopy {
   public:
    explicit CallScope(ModuleBase& module);
    ~CallScope();
    bool is_outermost() const { return call_.outer == nullptr; }

   private:
    detail::RunningCall call_;
  };
  class HookScope : tessera::detail::NoCopy {
   public:
    HookScope(ModuleBase& module, const Hooks& hooks) : module_(module), hooks_(hooks) {
      ++module_.running_calls_;
    }
    ~HookScope() {
      run_always_hooks(hooks_);
      --module_.running_calls_;
    }

   private:
    ModuleBase& module_;
    const Hooks& hooks_;
  };

  /// A function that stores the new tensor of a ParameterSlot in a member of a libtorch module.
  using Follow = std::function<void(const at::Tensor& tensor)>;
  /// The objects to update when the tensor of a ParameterSlot is replaced: the pointer that the
  /// parameter's nn::Parameter objects share, and the member of a libtorch module.
  struct Binding {
    std::shared_ptr<SlotPtr> handle;
    Follow follow;
  };

  struct Checkpointed {
    CheckpointOptions options;
    Hooks hooks;
  };

  void convert_buffers(std::optional<torch::Device> device, std::optional<torch::Dtype> dtype,
                       bool non_blocking);
  Parameter add_slot(const std::string& name, SlotPtr slot, Follow follow);
  void swap_parameter(const std::string& name, const at::Tensor& tensor);
  std::size_t index_of(const std::string& name) const;
  void note_fqn(const std::string& fqn) const;
  void note_names_of_tree() const;
  bool is_in_a_tree() const;
  void check_in_a_tree() const;
  void check_slots(const std::string& fqn) const;
  NamedSlots collect_slots(const NamedSlots ModuleBase::*own) const;

  NamedSlots slots_;
  std::vector<Binding> bindings_;
  NamedSlots buffer_slots_;
  Hooks hooks_;
  Hooks method_hooks_;
  std::unique_ptr<Checkpointed> checkpointed_;
  /// This module's FQN; mutable, because the const function named_slots() sets it.
  mutable std::optional<std::string> fqn_;
  mutable bool named_tree_ = false;
  int running_calls_ = 0;
  std::uint64_t checked_epoch_ = 0;
};

/// Base class of a user's module. module(args...) runs Derived::forward(args...) and the hooks;
/// module.forward(args...) runs no hooks. Arguments are copied, and may have any type that
/// visit_tensors supports. forward may return void.
template <class Derived>
class Module : public ModuleBase {
  /// Whether Derived::forward accepts the arguments of a call of this module.
  template <class... Args>
  static constexpr bool takes() {
    return requires(Derived& module, std::decay_t<Args>&... values) { module.forward(values...); };
  }

 public:
  using ModuleBase::ModuleBase;

  template <class... Args>
    requires(takes<Args...>())
  auto operator()(Args&&... args) {
    const CallScope call(*this);
    std::tuple<std::decay_t<Args>...> arguments(std::forward<Args>(args)...);
    try {
      if constexpr (std::is_void_v<decltype(call_either(arguments))>) {
        call_either(arguments);
      } else {
        auto result = call_either(arguments);
        if (call.is_outermost() && has_meta(detail::collect_tensors(result))) {
          this->check_meta_inputs(detail::collect_tensors(arguments));
        }
        return result;
      }
    } catch (...) {
      this->rethrow_named();
    }
  }

  /// Calls `method(arguments...)`, which must call a method of this module. The hooks that were
  /// added with HookedCalls::kEveryMethod run before and after the method. Arguments are copied.
  /// fsdp::register_forward_method uses call_method().
  template <class Method, class... Args>
  auto call_method(const Method& method, Args&&... args) {
    const CallScope call(*this);
    std::tuple<std::decay_t<Args>...> arguments(std::forward<Args>(args)...);
    try {
      return call_hooked(method_hooks(), method, arguments);
    } catch (...) {
      this->rethrow_named();
    }
  }

  /// An overload for arguments that forward does not accept. Makes the compiler's error message
  /// short.
  template <class... Args>
    requires(!takes<Args...>())
  at::Tensor operator()(Args&&...) {
    static_assert(detail::HasForward<Derived>,
                  "a module that is called needs a public forward, for example: "
                  "at::Tensor forward(const at::Tensor& x)");
    static_assert(!detail::HasForward<Derived> || takes<Args...>(),
                  "this module's forward does not take these arguments: compare their number and "
                  "types (a call passes copies of them, as lvalues)");
    return {};
  }

 private:
  template <class Tuple>
  auto call_either(Tuple& arguments) {
    const auto body = [this](auto&... values) { return this->call_forward(values...); };
    if (!checkpoints_calls()) {
      return call_hooked(hooks(), body, arguments);
    }
    return call_hooked(
        hooks(), [this](auto&... values) { return this->call_checkpointed(values...); }, arguments);
  }

  template <class... Values>
  auto call_forward(Values&... values) {
    return static_cast<Derived*>(this)->forward(values...);
  }

  template <class... Values>
  auto call_checkpointed(Values&... values) {
    // The lambda keeps the module alive, because the autograd graph, which stores the lambda, can
    // exist longer than all other pointers to the module.
    const auto region = [this, alive = this->weak_from_this().lock()](auto&... inputs) {
      const auto body = [this](auto&... arguments) { return this->call_forward(arguments...); };
      auto arguments = std::tie(inputs...);
      return this->call_hooked(this->checkpointed_hooks(), body, arguments);
    };
    if constexpr ((std::is_copy_constructible_v<Values> && ...)) {
      return checkpoint(checkpoint_options(), region, values...);
    } else {
      fail("activation checkpointing of a ", name(), " copies the arguments, but one argument ",
           "can't be copied; pass that argument by reference or pointer");
      return region(values...);
    }
  }

  template <class F, class Tuple>
  auto call_hooked(Hooks& hooks, const F& body, Tuple& arguments) {
    const HookScope running(*this, hooks);
    if (!hooks.before.empty()) {
      this->run_hooks(hooks.before, detail::collect_tensors(arguments));
    }
    if constexpr (std::is_void_v<decltype(std::apply(body, arguments))>) {
      std::apply(body, arguments);
      this->run_hooks(hooks.after, {});
    } else {
      auto result = std::apply(body, arguments);
      if (!hooks.after.empty()) {
        this->run_hooks(hooks.after, detail::collect_tensors(result));
      }
      return result;
    }
  }
};

/// Throws Error if parameters or buffers are uninitialized or on the meta device. The outermost
/// call of a module makes the same check. `caller`: the caller's name, for messages.
void check_initialized(const ModuleBase& module, const std::string& caller = "check_initialized");

namespace detail {

/// Options of visit_modules(): the order of modules, repeated visits, and the modules to skip.
struct ModuleWalk {
  /// If true, a module that is registered several times is visited under each of its FQNs. If
  /// false, the module is visited once, under the first FQN.
  bool every_place = false;
  /// Whether children are visited before their parent.
  bool children_first = false;
  /// Returns whether to skip a module and all modules below it. Called before the module's children
  /// are visited. An empty function skips no module.
  std::function<bool(const torch::nn::Module& module)> skip{};
};

using ModuleVisitor = std::function<void(const std::string& fqn, torch::nn::Module& module)>;
void walk_modules(torch::nn::Module& root, const ModuleVisitor& visit, const ModuleWalk& walk);

}  // namespace detail

/// Calls visit(fqn, module) for `root` (FQN "") and every module below it, depth first. By default,
/// visits each module once and parents before children:
///
///   nn::visit_modules(model, [](const std::string& fqn, nn::ModuleBase& module) { ... });
///   nn::visit_modules(model, [](const std::string& fqn, torch::nn::Module& module) { ... });
///
/// The first form skips libtorch's modules, but not the ModuleBase objects below them. The visitor
/// must not register modules. Not collective. Several threads may visit the same modules.
template <class Visit>
void visit_modules(torch::nn::Module& root, const Visit& visit,
                   const detail::ModuleWalk& walk = {}) {
  if constexpr (std::is_invocable_v<const Visit&, const std::string&, torch::nn::Module&>) {
    detail::walk_modules(root, visit, walk);
  } else {
    const auto visit_base = [&visit](const std::string& fqn, torch::nn::Module& module) {
      if (auto* base = dynamic_cast<ModuleBase*>(&module)) {
        visit(fqn, *base);
      }
    };
    detail::walk_modules(root, visit_base, walk);
  }
}

/// The same as visit_modules() for a mutable module.
template <class Visit>
  requires std::is_invocable_v<const Visit&, const std::string&, const ModuleBase&>
void visit_modules(const torch::nn::Module& root, const Visit& visit,
                   const detail::ModuleWalk& walk = {}) {
  // Casting away const is safe, because libtorch returns the children of a const module as mutable
  // modules.
  visit_modules(const_cast<torch::nn::Module&>(root), visit, walk);
}

/// Freezes the parameters whose FQN matches a pattern (matches_fqn). Frozen parameters get no
/// gradient, reduction or optimizer state, but are saved in checkpoints. For a tied parameter one
/// matching FQN suffices. Do not call freeze() between a forward and its backward.
///
/// Not collective; every rank must freeze the same parameters. Throws Error, before any change, for
/// a pattern without a match.
void freeze(ModuleBase& module, const std::vector<std::string>& patterns);

/// Distributes all parameters and buffers in and below `module`, like PyTorch's distribute_module.
/// Calls `partition` for each module with its FQN, parents first. `partition` may call
/// distribute_parameter(); all other parameters become replicated. Later calls of the root module
/// pass the tensors of arguments to `input` and of results to `output`. Both may replace the
/// tensors.
///
/// Not collective: the values must be equal on every rank. Throws Error for a module that is
/// already distributed, and for a child with parameters that is not a ModuleBase.
void distribute_module(
    ModuleBase& module, const DeviceMesh& mesh,
    const std::function<void(const std::string& name, ModuleBase& module, const DeviceMesh& mesh)>&
        partition = nullptr,
    const std::function<void(TensorList tensors, const DeviceMesh& mesh)>& input = nullptr,
    const std::function<void(TensorList tensors, const DeviceMesh& mesh)>& output = nullptr);

/// Distributes the plain tensor in `slot`. The tensor must be equal on every rank; each rank keeps
/// only its shard. Not collective. Throws Error for a distributed tensor and for a tensor of an
/// FSDP unit. `by`: the caller's name, for messages.
void distribute_parameter(ParameterSlot& slot, const DeviceMesh& mesh, const Placements& placements,
                          const std::string& by = "distribute_parameter");

/// A function that decides whether the calls of a module are checkpointed. The function must have
/// no side effects, and must return the same result on every rank.
using ModulePredicate = std::function<bool(const std::string& fqn, const ModuleBase& module)>;

/// Returns a predicate that selects the modules of class M or a derived class.
template <class M>
ModulePredicate of_class() {
  return [](const std::string&, const ModuleBase& module) {
    return dynamic_cast<const M*>(&module) != nullptr;
  };
}
/// Returns a predicate that selects the modules whose FQN matches a pattern such as
/// "model.layers.*" (matches_fqn).
ModulePredicate named(std::string pattern);

/// Runs each call of the selected modules, possibly `root`, as an nn::checkpoint(). Returns the
/// FQNs of the selected modules. Call this function after parallelize_module and before
/// fully_shard: the recomputation must repeat tensor-parallel hooks, but not all-gathers. Not
/// collective; every rank must select the same modules. Throws Error if no module is selected.
std::vector<std::string> apply_activation_checkpointing(ModuleBase& root,
                                                        const ModulePredicate& select,
                                                        const CheckpointOptions& options = {});

/// A list of modules with FQNs "0", "1", ..., without a forward, like torch.nn.ModuleList.
class ModuleList : public ModuleBase {
 public:
  template <class M>
  std::shared_ptr<M> push_back(std::shared_ptr<M> module) {
    modules_.push_back(module);
    return register_module(std::to_string(modules_.size() - 1), std::move(module));
  }
  std::size_t size() const { return modules_.size(); }
  const std::vector<std::shared_ptr<ModuleBase>>& items() const { return modules_; }
  /// Returns the module at `index`, cast to M. Throws Error if the index is out of range or the
  /// module is not an M.
  template <class M>
  std::shared_ptr<M> at(std::size_t index) const {
    TESSERA_CHECK(index < size(), "index ", index, " is out of range for a ModuleList of ", size(),
                  " modules");
    auto module = std::dynamic_pointer_cast<M>(modules_[index]);
    TESSERA_CHECK(module, "module ", index, " of a ModuleList is a ", modules_[index]->name(),
                  "; pass the type of the module to at()");
    return module;
  }

 private:
  std::vector<std::shared_ptr<ModuleBase>> modules_;
};

/// Runs modules one after another. Each module maps a tensor to a tensor. The FQNs are "0", "1",
/// ...
class Sequential : public Module<Sequential> {
 public:
  template <class... Modules>
  explicit Sequential(std::shared_ptr<Modules>... modules) {
    (push_back(std::move(modules)), ...);
  }
  template <class M>
  std::shared_ptr<M> push_back(std::shared_ptr<M> module) {
    steps_.push_back([m = module.get()](const at::Tensor& x) -> at::Tensor { return (*m)(x); });
    return register_module(std::to_string(steps_.size() - 1), std::move(module));
  }
  at::Tensor forward(at::Tensor x) {
    check_called();
    for (const auto& step : steps_) {
      x = step(x);
    }
    return x;
  }

 private:
  std::vector<std::function<at::Tensor(const at::Tensor&)>> steps_;
};

/// A child module that is constructed and registered in its declaration:
///
///   struct Block : nn::Module<Block> {
///     at::Tensor forward(const at::Tensor& x) { return x + mlp(norm(x)); }
///     nn::Child<nn::RMSNorm> norm{*this, "norm", 512};
///     nn::Child<nn::GeluMlp> mlp{*this, "mlp", options};
///   };
///
/// The same as `register_module(name, std::make_shared<M>(args...))` in the parent's constructor.
template <class M>
class Child {
 public:
  /// Constructs the module from `args`. Throws c10::Error if the parent already has a child of the
  /// given name.
  template <class... Args>
  Child(ModuleBase& parent, const std::string& name, Args&&... args)
      : module_(parent.register_module(name, std::make_shared<M>(std::forward<Args>(args)...))) {}

  /// Calls the child module, including its hooks.
  template <class... Args>
  auto operator()(Args&&... args) const {
    return (*module_)(std::forward<Args>(args)...);
  }
  M* operator->() const { return module_.get(); }
  M& operator*() const { return *module_; }

 private:
  std::shared_ptr<M> module_;
};

/// Whether an FQN matches a pattern. All name patterns of the library have this syntax. Names and
/// patterns are split at the dots, and compared segment by segment:
///   *       zero or more characters           "layers.*.w" matches "layers.10.w"
///   ?       one character                     "layers.?.w" matches "layers.3.w"
///   [qkv]   one of the listed characters      "attn.[qkv]_proj" matches "attn.q_proj"
///   [0-9]   one character of the range        "layers.[0-3]" matches "layers.2"
///   [!0-9]  one character not of the range    "layers.[!0-3]" and "layers.[^0-3]" match "layers.4"
///   **      zero or more segments (the whole segment must be "**"):
///           "layers.**.w" matches "layers.w" and "layers.0.mlp.w"; "**" matches every name
/// Other characters match themselves, also a '[' without a ']'. There is no escape character. ""
/// and "**" match the root module's name "", "*" does not. Thread safe.
bool matches_fqn(std::string_view pattern, std::string_view fqn);

namespace detail {

/// Returns the FQN of a module's child: join_fqn("layers.0", "mlp") is "layers.0.mlp".
std::string join_fqn(const std::string& parent, const std::string& name);

}  // namespace detail

}  // namespace tessera::nn
TESSERA_API_END
