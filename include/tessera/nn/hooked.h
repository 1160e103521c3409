#pragma once

#include <array>
#include <memory>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/export.h"
#include "tessera/nn/detail/deferred_bias.h"
#include "tessera/nn/detail/held_part.h"
#include "tessera/nn/meta_device.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// A parameter of a module class that knows nothing of slots: its name and its member.
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

/// `weight` and `bias`, as far as M has them: the parameters of most of libtorch's modules. By
/// name, so that this header need not include those modules.
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

/// The parameters of module class M, for nn::Hooked: its members `weight` and `bias` by default.
/// Specialise it for a class with others, one line each:
///   template <>
///   inline constexpr std::array nn::kSlotMembers<MyImpl>{
///       nn::SlotMember<MyImpl>{"scale", &MyImpl::scale}};
template <class M>
inline constexpr auto kSlotMembers = detail::weight_and_bias<M>();

/// Holds a stock torch::nn module (or your own) that has neither hooks nor slots, and gives it
/// both:
///   nn::Hooked<torch::nn::Linear> fc(torch::nn::LinearOptions(8, 4));
/// `Holder` is libtorch's module holder. The parameters have the names that they have in the
/// module: those of libtorch's modules inside of it (TransformerEncoderLayer) as well, which are
/// sharded, initialised and saved with it. Nothing calls these by way of hooks: a unit of FSDP is
/// the whole, and a plan places their parameters by place_parameters(), or leaves them replicated.
/// Shapes, gradients and what forward throws are the module's; on distributed parameters
/// it communicates what its operators do. The styles of tensor parallelism take a held
/// torch::nn::Linear or Embedding as nn's own. A module made on the meta device has no initialiser:
/// a module above fills its parameters in reset_parameters (InitContext::fill with a table), or a
/// checkpoint does.
template <class Holder>
class Hooked : public Module<Hooked<Holder>>, public detail::DeferredBias {
 public:
  using Held = typename Holder::ContainedType;

  /// Makes the module of `args`. Throws Error for a parameter that is neither in kSlotMembers nor a
  /// member of a class of libtorch's, and in a MetaDevice scope for a module that has buffers. Not
  /// collective.
  template <class... Args>
  explicit Hooked(Args&&... args) : held_(std::make_shared<Held>(std::forward<Args>(args)...)) {
    for (const SlotMember<Held>& slot : kSlotMembers<Held>) {
      at::Tensor& tensor = (*held_).*(slot.member);
      if (tensor.defined()) {
        this->bind_slot(slot.name, tensor);
      }
    }
    HeldPart::Maker().fill(*this, *held_);
    check_complete();
  }

  template <class... Args>
    requires requires(Held& held, Args&&... args) { held.forward(std::forward<Args>(args)...); }
  auto forward(Args&&... args) {
    this->check_called();
    const BiasScope bias(this->leaves_out_bias() ? held_.get() : nullptr);
    return held_->forward(std::forward<Args>(args)...);
  }
  /// Of the module that is held, too.
  void train(bool on = true) override {
    Module<Hooked>::train(on);
    held_->train(on);
  }
  /// Its forward runs without hooks.
  Held& held() { return *held_; }

 private:
  /// `module`, if any, lacks its bias for as long as this lives.
  class BiasScope {
   public:
    explicit BiasScope(Held* module) : module_(module) { exchange(); }
    BiasScope(const BiasScope&) = delete;
    BiasScope& operator=(const BiasScope&) = delete;
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

  void check_complete() const {
    const auto known = this->named_parameters();
    for (const auto& parameter : held_->named_parameters()) {
      const std::string& name = parameter.key();
      TESSERA_CHECK(known.contains(name), "parameter '", name, "' of a ", held_->name(),
                    name.find('.') == std::string::npos
                        ? " is not in its kSlotMembers; name it there"
                        : " is in a module of no class of libtorch's; derive that one from "
                          "nn::Module");
    }
    for (const auto& buffer : held_->named_buffers()) {
      TESSERA_CHECK(
          !buffer.value().is_meta(), "buffer '", buffer.key(), "' of a ", held_->name(),
          " would be on the meta device, where nothing can re-make it; construct it outside "
          "the MetaDevice scope");
    }
  }

  std::shared_ptr<Held> held_;
};

}  // namespace tessera::nn
TESSERA_API_END
