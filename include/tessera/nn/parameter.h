#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace tessera::nn {

class ModuleBase;

/// The cell behind a parameter. TP and FSDP swap the tensor in it (whole, sharded, unsharded) while
/// names, named_parameters() and whoever holds the slot (an optimizer) stay valid. Modules that
/// share a parameter share its slot.
class ParameterSlot {
 public:
  struct Owner {
    ModuleBase* module;
    std::string name;
  };

  explicit ParameterSlot(at::Tensor tensor) : tensor_(std::move(tensor)) {}

  /// What forward sees now: under FSDP the sharded or the unsharded tensor.
  const at::Tensor& get() const { return tensor_; }
  /// Swaps the tensor here and in named_parameters() of every owner.
  void set(at::Tensor tensor);
  /// The tensor that persists: optimizers, clipping, checkpoints use it. Equal to get() unless FSDP
  /// keeps it sharded and has gathered it.
  const at::Tensor& persistent() const { return persistent_.defined() ? persistent_ : tensor_; }
  /// FSDP: keeps `tensor` as the persistent one; get() is swapped with set().
  void set_persistent(at::Tensor tensor) { persistent_ = std::move(tensor); }

  const std::vector<Owner>& owners() const { return owners_; }
  void add_owner(ModuleBase* module, std::string name);
  void remove_owner(const ModuleBase* module);

 private:
  at::Tensor tensor_;
  at::Tensor persistent_;
  std::vector<Owner> owners_;
};
using SlotPtr = std::shared_ptr<ParameterSlot>;

/// A module's parameter: a handle of its slot that reads as a tensor.
///   nn::Parameter weight = register_parameter("weight", {out, in});
class Parameter {
 public:
  Parameter() = default;
  explicit Parameter(SlotPtr slot) : slot_(std::move(slot)) {}
  operator const at::Tensor&() const { return slot_->get(); }
  const at::Tensor& operator*() const { return slot_->get(); }
  const at::Tensor* operator->() const { return &slot_->get(); }
  bool defined() const { return slot_ != nullptr && slot_->get().defined(); }
  const SlotPtr& slot() const { return slot_; }

 private:
  SlotPtr slot_;
};

}  // namespace tessera::nn
