#pragma once

#include <array>
#include <memory>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/nn/meta_device.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

/// A parameter of a module class that knows nothing of slots: its name and its member.
template <class M>
struct SlotMember {
  const char* name;
  at::Tensor M::*member;
};

/// The parameters of module class M, so that nn::Hooked can hold it: specialise it, one line a
/// class (stock_modules.h has libtorch's most used ones):
///   template <>
///   inline constexpr std::array nn::kSlotMembers<MyImpl>{
///       nn::SlotMember<MyImpl>{"weight", &MyImpl::weight}};
/// A module without parameters needs none.
template <class M>
inline constexpr auto kSlotMembers = std::array<SlotMember<M>, 0>{};

/// Holds a stock torch::nn module (or your own) that has neither hooks nor slots, and gives it
/// both:
///   nn::Hooked<torch::nn::Linear> fc(torch::nn::LinearOptions(8, 4));
/// `Holder` is libtorch's module holder. The parameters have the names that they have in the
/// module.
template <class Holder>
class Hooked : public Module<Hooked<Holder>> {
 public:
  using Held = typename Holder::ContainedType;

  template <class... Args>
  explicit Hooked(Args&&... args) : held_(std::make_shared<Held>(std::forward<Args>(args)...)) {
    for (const SlotMember<Held>& slot : kSlotMembers<Held>) {
      at::Tensor& tensor = (*held_).*(slot.member);
      if (tensor.defined()) this->bind_slot(slot.name, tensor);
    }
    check_complete();
  }

  template <class... Args>
  auto forward(Args&&... args) {
    return held_->forward(std::forward<Args>(args)...);
  }
  void train(bool on = true) override {
    Module<Hooked>::train(on);
    held_->train(on);
  }
  Held& held() { return *held_; }

 private:
  void check_complete() const {
    for (const auto& parameter : held_->named_parameters()) {
      const auto known = this->named_parameters(/*recurse=*/false);
      TESSERA_CHECK(known.contains(parameter.key()), "parameter '", parameter.key(), "' of a ",
                    held_->name(), " is not in its kSlotMembers; name it there");
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
