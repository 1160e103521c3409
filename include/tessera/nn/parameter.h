#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/detail/records.h"

TESSERA_API_BEGIN
namespace tessera::nn {

class ModuleBase;

namespace detail {

/// The internal state of a ParameterSlot, which FSDP, tensor parallelism and modules change.
class SlotState : tessera::detail::NoCopy {
 public:
  /// A module that has the parameter, and the parameter's name in this module.
  struct Owner {
    ModuleBase* module;
    std::string name;
  };

  /// Replaces the tensor by a tensor with the same values in another layout. An uninitialized
  /// parameter remains uninitialized.
  void swap(at::Tensor tensor);
  bool has_persistent() const { return persistent_.defined(); }
  /// For FSDP: sets the tensor of persistent(). Later calls of swap() change only that of get().
  void set_persistent(at::Tensor tensor);
  /// Whether the tensor is initialized: by init_weights, a load, the caller of the constructor, or
  /// an in-place write, which autograd's version counter shows. swap() does not change this state.
  bool initialized() const;
  void set_initialized(bool initialized);
  const std::vector<Owner>& owners() const { return owners_; }

  SlotRole role;

 protected:
  SlotState(at::Tensor tensor, bool initialized);
  const at::Tensor& stored() const { return persistent_.defined() ? persistent_ : tensor_; }
  void show(at::Tensor tensor);

  at::Tensor tensor_;
  at::Tensor persistent_;
  std::string fqn_;

 private:
  friend class tessera::nn::ModuleBase;
  void set_fqn(const std::string& fqn);
  void add_owner(ModuleBase* module, std::string name);
  void remove_owner(const ModuleBase* module, const std::string& name);

  bool initialized_;
  /// The version counter of the uninitialized tensor: a larger value shows an in-place write.
  std::uint64_t unfilled_version_ = 0;
  std::vector<Owner> owners_;
};

}  // namespace detail

/// The tensor of a parameter or buffer. Tensor parallelism and FSDP replace the tensor, but not the
/// names; optimizers use the new tensor. Modules that share a parameter share its ParameterSlot.
/// Thread safety: one thread at a time.
class ParameterSlot : public detail::SlotState {
 public:
  /// `initialized`: whether the tensor has values; false for new storage that must still be filled.
  ParameterSlot(at::Tensor tensor, bool initialized)
      : detail::SlotState(std::move(tensor), initialized) {}

  /// Returns the tensor that forward uses now. With FSDP this is the unsharded tensor while the
  /// unit computes and after fsdp::unshard(), otherwise the shard.
  const at::Tensor& get() const { return tensor_; }
  /// Replaces the tensor by a tensor with other values, also in named_parameters() and adopted
  /// modules. The parameter is then initialized, unless the tensor is on the meta device.
  void set(at::Tensor tensor);
  /// Returns the tensor for optimizers, gradient clipping and checkpoints: for a parameter that
  /// FSDP has gathered, the shard; otherwise the same as get().
  const at::Tensor& persistent() const { return stored(); }
  /// Returns the longest FQN that named_slots() has found for the parameter, for messages. Empty
  /// before the first call of named_slots().
  const std::string& fqn() const { return fqn_; }

  /// Returns the mesh along which ranks have unrelated parameters of one name (experts, pipeline
  /// stages). Undefined: other slices of the root mesh have copies.
  const DeviceMesh& distinct_along() const { return distinct_along_; }
  void set_distinct_along(DeviceMesh mesh) { distinct_along_ = std::move(mesh); }

 private:
  DeviceMesh distinct_along_;
};
/// A shared pointer to a ParameterSlot, which modules and optimizers share.
using SlotPtr = std::shared_ptr<ParameterSlot>;

/// A module's parameter: a handle that converts to the tensor of a ParameterSlot, also after
/// tie_slot().
///   nn::Parameter weight = register_slot("weight", {out, in});
class Parameter {
 public:
  /// Constructs a handle without a parameter, which converts to an undefined tensor.
  Parameter() = default;
  explicit Parameter(SlotPtr slot) : slot_(std::make_shared<SlotPtr>(std::move(slot))) {}
  Parameter(const Parameter&) = default;
  Parameter& operator=(Parameter&&) = default;
  // Deleted because `head->weight = embed->weight` would not tie the weights. The compiler's error
  // message shows the next line, whose comment has the right call:
  Parameter& operator=(const Parameter&) = delete;  // tie_slot("weight", other.slot("weight"))

  operator const at::Tensor&() const { return get(); }
  const at::Tensor& operator*() const { return get(); }
  const at::Tensor* operator->() const { return &get(); }
  bool defined() const { return get().defined(); }
  /// Returns the parameter's ParameterSlot; nullptr for a handle without a parameter.
  SlotPtr slot() const { return slot_ == nullptr ? nullptr : *slot_; }

 private:
  friend class ModuleBase;
  const at::Tensor& get() const;

  std::shared_ptr<SlotPtr> slot_;
};

}  // namespace tessera::nn
TESSERA_API_END
