#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera::nn {

class ModuleBase;

/// The cell behind a parameter or a buffer. TP and FSDP swap the tensor in it (whole, sharded,
/// unsharded) while names, named_parameters() and whoever holds the slot (an optimizer) stay valid.
/// Modules that share a parameter share its slot.
class ParameterSlot {
 public:
  struct Owner {
    ModuleBase* module;
    std::string name;
  };

  /// `initialized`: whether the tensor holds values (false: fresh storage that somebody must fill).
  ParameterSlot(at::Tensor tensor, bool initialized)
      : tensor_(std::move(tensor)), initialized_(initialized) {}
  ParameterSlot(const ParameterSlot&) = delete;
  ParameterSlot& operator=(const ParameterSlot&) = delete;

  /// What forward sees now: under FSDP the sharded or the unsharded tensor.
  const at::Tensor& get() const { return tensor_; }
  /// Swaps the tensor here, in named_parameters() and in the bound member of every owner.
  void set(at::Tensor tensor);
  /// The tensor that persists: optimizers, clipping, checkpoints use it. Equal to get() unless FSDP
  /// keeps it sharded and has gathered it.
  const at::Tensor& persistent() const { return persistent_.defined() ? persistent_ : tensor_; }
  bool has_persistent() const { return persistent_.defined(); }
  /// FSDP: keeps `tensor` as the persistent one; get() is swapped with set().
  void set_persistent(at::Tensor tensor) { persistent_ = std::move(tensor); }

  /// FSDP: the mesh on which slices like the parameter's own hold other parameters instead of
  /// copies (experts); none: all slices hold copies.
  const DeviceMesh& distinct_over() const { return distinct_over_; }
  void set_distinct_over(DeviceMesh mesh) { distinct_over_ = std::move(mesh); }

  /// Whether somebody has filled the storage: init_weights, a load, or the constructor's caller.
  /// Stays when the tensor is swapped.
  bool initialized() const { return initialized_; }
  void set_initialized(bool initialized) { initialized_ = initialized; }

  const std::vector<Owner>& owners() const { return owners_; }

 private:
  friend class ModuleBase;
  void add_owner(ModuleBase* module, std::string name);
  void remove_owner(const ModuleBase* module, const std::string& name);

  at::Tensor tensor_;
  at::Tensor persistent_;
  DeviceMesh distinct_over_;
  bool initialized_;
  std::vector<Owner> owners_;
};
using SlotPtr = std::shared_ptr<ParameterSlot>;

/// A module's parameter: a handle that reads as the tensor in the slot, and follows when the slot
/// itself is replaced (tied weights). Copies are one handle.
///   nn::Parameter weight = register_slot("weight", {out, in});
class Parameter {
 public:
  /// No parameter: reads as an undefined tensor.
  Parameter() = default;
  explicit Parameter(SlotPtr slot) : slot_(std::make_shared<SlotPtr>(std::move(slot))) {}

  operator const at::Tensor&() const { return get(); }
  const at::Tensor& operator*() const { return get(); }
  const at::Tensor* operator->() const { return &get(); }
  bool defined() const { return get().defined(); }
  /// nullptr if there is none.
  SlotPtr slot() const { return slot_ == nullptr ? nullptr : *slot_; }

 private:
  friend class ModuleBase;
  const at::Tensor& get() const;

  std::shared_ptr<SlotPtr> slot_;
};

}  // namespace tessera::nn
