#pragma once

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"
#include "tessera/nn/detail/adopted_module.h"
#include "tessera/nn/detail/linear_product.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// A parameter of a torch::nn module class: the name of the parameter, and the class member that
/// stores the parameter.
template <class M>
struct SlotMember {
  const char* name;
  at::Tensor M::*member;
};

namespace detail {

template <class M>
concept HasWeight = requires { static_cast<at::Tensor M::*>(&M::weight); };
template <class M>
concept HasBias = requires { static_cast<at::Tensor M::*>(&M::bias); };

/// Returns the members `weight` and `bias` of M. A lookup by name avoids the headers of libtorch's
/// modules.
template <class M>
constexpr auto weight_and_bias() {
  if constexpr (HasWeight<M> && HasBias<M>) {
    return std::array{SlotMember<M>{"weight", &M::weight}, SlotMember<M>{"bias", &M::bias}};
  } else if constexpr (HasWeight<M>) {
    return std::array{SlotMember<M>{"weight", &M::weight}};
  } else {
    return std::array<SlotMember<M>, 0>{};
  }
}

}  // namespace detail

/// The members in which module class M stores its parameters, for nn::Hooked and nn::adopt.
/// Default: `weight` and `bias`. Specialise kSlotMembers for a class with other parameters:
///   template <>
///   inline constexpr std::array nn::kSlotMembers<MyImpl>{
///       nn::SlotMember<MyImpl>{"scale", &MyImpl::scale}};
template <class M>
inline constexpr auto kSlotMembers = detail::weight_and_bias<M>();

namespace detail {

/// The FindMembers function for module class M, which finds the members that kSlotMembers<M> lists.
template <class M>
void find_members(torch::nn::Module& module, ModuleMembers& found) {
  if (auto* held = dynamic_cast<M*>(&module)) {
    for (const SlotMember<M>& slot : kSlotMembers<M>) {
      found.emplace_back(slot.name,
                         [held, member = slot.member]() -> at::Tensor& { return held->*member; });
    }
  }
}

}  // namespace detail

/// Gives hooks and parameter slots to a module class that is not derived from nn::Module:
///   nn::Hooked<torch::nn::Linear> fc(torch::nn::LinearOptions(8, 4));
/// `Holder` is libtorch's module holder. nn::adopt does the same for an existing module or model.
///
/// Inner modules have no hooks, so the smallest FSDP unit is the whole module. init_weights fills
/// the parameters of libtorch's classes like their reset_parameters. Other parameters keep the
/// values from their constructor, unless set_initializers() names them. See docs/torch_nn.md.
template <class Holder>
class Hooked : public Module<Hooked<Holder>>,
               public detail::DeferredBias,
               public detail::AdoptsModule {
  using Held = typename Holder::ContainedType;

 public:
  /// Constructs the wrapped module from `args`. Throws Error if neither kSlotMembers nor a libtorch
  /// class declares a parameter or, in a MetaDevice scope, a buffer. Not collective.
  template <class... Args>
  explicit Hooked(Args&&... args)
      : Hooked(std::make_shared<Held>(std::forward<Args>(args)...), {}) {}
  /// Wraps the existing `module`, for nn::adopt. `classes` has a function for each further module
  /// class with kSlotMembers; the function finds the parameters of that class inside `module`.
  Hooked(std::shared_ptr<Held> module, std::vector<detail::FindMembers> classes)
      : held_(std::move(module)), taken_(detail::claim_module(*held_)) {
    classes.push_back(&detail::find_members<Held>);
    AdoptedModule::Maker(std::move(classes)).fill(*this, *held_);
  }

  template <class... Args>
    requires requires(Held& held, Args&&... args) { held.forward(std::forward<Args>(args)...); }
  auto forward(Args&&... args) {
    this->check_called();
    const BiasScope bias(this->leaves_out_bias() ? held_.get() : nullptr);
    return held_->forward(std::forward<Args>(args)...);
  }
  /// Sets initialisers for parameters below this module, by FQN. These initialisers replace the
  /// defaults of the module classes. init_weights throws Error for a pattern that matches nothing.
  void set_initializers(Initializers table) { initializers_ = std::move(table); }
  /// Sets the training mode of this module and of the wrapped module.
  void train(bool on = true) override {
    Module<Hooked>::train(on);
    held_->train(on);
  }
  bool is_training() const noexcept override { return held_->is_training(); }
  /// Returns the wrapped module. held().forward() runs without hooks.
  Held& held() { return *held_; }

 private:
  void reset_parameters(const InitContext& init) override {
    init.fill(*this, initializers_);
    detail::reset_adopted(*held_, *this, init);
  }
  const torch::nn::Module& adopted_module() const override { return *held_; }

  /// While a BiasScope exists, `module->bias` is undefined, so that forward adds no bias.
  class BiasScope : tessera::detail::NoCopy {
   public:
    explicit BiasScope(Held* module) : module_(module) { exchange(); }
    ~BiasScope() { exchange(); }

   private:
    void exchange() {
      if constexpr (detail::HasBias<Held>) {
        if (module_ != nullptr) {
          std::swap(module_->bias, bias_);
        }
      }
    }

    Held* module_;
    at::Tensor bias_;
  };

  std::shared_ptr<Held> held_;
  std::shared_ptr<const void> taken_;
  Initializers initializers_;
};

/// The type that nn::adopt returns for a module of class M.
template <class M>
using Adopted = Hooked<torch::nn::ModuleHolder<M>>;

/// Wraps an existing model made of libtorch's modules. The model is not changed:
///   const auto model = nn::adopt(std::make_shared<Net>());  // struct Net : torch::nn::Module
///   tensor_parallel::parallelize_module(*model, mesh["tp"], {{"fc1", colwise_parallel()}});
///   fsdp::fully_shard(*model, mesh["dp"]);
///   const at::Tensor y = (*model)(x);                       // Net::forward
/// The result and `module` share the parameters. Call the result instead of `module`. `Classes`:
/// the model's own inner classes with parameters; specialise kSlotMembers for each of these
/// classes.
///
/// Throws Error for a parameter without a declared class member, and for a class member with
/// another tensor than the registered one. Throws Error for a module that is already adopted. Not
/// collective.
template <class... Classes, class M>
std::shared_ptr<Adopted<M>> adopt(std::shared_ptr<M> module) {
  TESSERA_CHECK(module != nullptr, "nn::adopt was given a null module; construct the module first");
  return std::make_shared<Adopted<M>>(
      std::move(module), std::vector<detail::FindMembers>{&detail::find_members<Classes>...});
}
/// The same as adopt() of a pointer, for a module holder: torch::nn::Sequential, TORCH_MODULE(Net).
template <class... Classes, class M>
std::shared_ptr<Adopted<M>> adopt(const torch::nn::ModuleHolder<M>& module) {
  TESSERA_CHECK(!module.is_empty(), "nn::adopt was given an empty holder; construct the module");
  return adopt<Classes...>(module.ptr());
}

}  // namespace tessera::nn
TESSERA_API_END
