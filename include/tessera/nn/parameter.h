#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/layout_math.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_BEGIN
namespace tessera::nn {

class ModuleBase;

/// How files store a fused parameter: as separate tensors, named after the modules that the fused
/// module replaces. The parameter's rows are `groups` equal runs; each run has the rows of every
/// part, one part after another.
struct StoredParts {
  /// The rows of one replaced module, which is a sibling of the fused module: "q_proj".
  struct Part {
    std::string module;
    std::int64_t rows = 0;  ///< rows of this module in each group
  };
  std::vector<Part> parts;
  std::int64_t groups = 1;
};

/// Rows of a fused parameter that files store as one tensor.
struct NamedRows {
  std::string name;
  PartRows rows;
};
/// The parts of the parameter `fqn`: "layers.0.qkv.weight" has the parts "layers.0.q.weight" and so
/// on.
std::vector<NamedRows> rows_of_parts(const std::string& fqn, const StoredParts& stored);

/// The place of a parameter or a buffer. Tensor parallelism and FSDP swap the tensor in it (plain,
/// sharded, unsharded). Names, named_parameters() and holders of the slot, such as optimizers, stay
/// valid. Modules that share a parameter share its slot. Thread safety: one thread at a time.
class ParameterSlot {
 public:
  /// A module that has the slot as a parameter, and the parameter's name in it.
  struct Owner {
    ModuleBase* module;
    std::string name;
  };

  /// `initialized`: whether the tensor has values. false: new storage that must be filled.
  ParameterSlot(at::Tensor tensor, bool initialized);
  ParameterSlot(const ParameterSlot&) = delete;
  ParameterSlot& operator=(const ParameterSlot&) = delete;

  /// The tensor that forward uses now: under FSDP the unsharded tensor while the unit computes (or
  /// after fsdp::unshard), otherwise the shard.
  const at::Tensor& get() const { return tensor_; }
  /// Replaces the tensor by one with other values, also in named_parameters() and in the bound
  /// member of every owner. The slot then counts as initialized, unless the tensor is on the meta
  /// device.
  void set(at::Tensor tensor);
  /// Like set(), for a tensor with the same values in another layout. A slot without values stays
  /// uninitialized.
  void swap(at::Tensor tensor);
  /// The tensor for optimizers, gradient clipping and saved checkpoints. It equals get(), except
  /// while FSDP has put the unsharded parameter into the slot: then get() is the unsharded tensor
  /// and persistent() the shard.
  const at::Tensor& persistent() const { return persistent_.defined() ? persistent_ : tensor_; }
  bool has_persistent() const { return persistent_.defined(); }
  /// For FSDP: makes `tensor` the persistent tensor. swap() then changes only get().
  void set_persistent(at::Tensor tensor);
  /// Whether FSDP has gathered the parameter, so that its values are in memory a second time,
  /// unsharded.
  bool gathered() const { return gathered_; }
  void set_gathered(bool gathered) { gathered_ = gathered; }

  /// The longest FQN that named_slots() has given the parameter, for messages; empty before.
  const std::string& fqn() const { return fqn_; }
  void set_fqn(const std::string& fqn);

  /// For experts under FSDP: the mesh along which this parameter is distinct. The parameter is on a
  /// slice of this mesh, and other slices have other parameters. Undefined: other slices have
  /// copies. optim::NormOptions::distinct_along expresses the same by dimension names.
  const DeviceMesh& distinct_along() const { return distinct_along_; }
  void set_distinct_along(DeviceMesh mesh) { distinct_along_ = std::move(mesh); }

  /// For tensor parallelism: whether the parameter is replicated because no plan has named it. A
  /// later plan may still place it.
  bool replicated_by_default() const { return replicated_by_default_; }
  void set_replicated_by_default(bool by_default) { replicated_by_default_ = by_default; }

  /// Whether the parameter belongs to an adapter (apply_lora). Initialiser tables skip such
  /// parameters.
  bool of_adapter() const { return of_adapter_; }
  void set_of_adapter(bool of_adapter) { of_adapter_ = of_adapter; }

  /// Set if files store the parameter as separate parts. Initialisation draws the same numbers for
  /// the parts as for separate parameters.
  const std::optional<StoredParts>& stored_parts() const { return stored_parts_; }
  void set_stored_parts(StoredParts parts) { stored_parts_ = std::move(parts); }

  /// Whether saved sharded checkpoints and state dicts contain it. false for buffers that are not
  /// persistent.
  bool saved() const { return saved_; }
  void set_saved(bool saved) { saved_ = saved; }

  /// Whether the storage has been filled: by init_weights, a load, the constructor's caller, or an
  /// in-place operator (detected by autograd's version counter). A swap does not change it.
  bool initialized() const;
  void set_initialized(bool initialized);

  const std::vector<Owner>& owners() const { return owners_; }

 private:
  friend class ModuleBase;
  void add_owner(ModuleBase* module, std::string name);
  void remove_owner(const ModuleBase* module, const std::string& name);

  void show(at::Tensor tensor);

  at::Tensor tensor_;
  at::Tensor persistent_;
  DeviceMesh distinct_along_;
  std::optional<StoredParts> stored_parts_;
  std::string fqn_;
  bool gathered_ = false;
  bool replicated_by_default_ = false;
  bool of_adapter_ = false;
  bool initialized_;
  std::uint64_t unfilled_version_ = 0;  ///< version of persistent() while it was not filled
  std::vector<Owner> owners_;
  bool saved_ = true;
};
/// Shared by the owning modules and by optimizers.
using SlotPtr = std::shared_ptr<ParameterSlot>;

/// "parameter 'layers.0.up.weight'", or "a parameter of sizes [8, 4]" while no FQN is known. For
/// messages.
std::string describe(const ParameterSlot& slot);

/// A module's parameter: a handle that converts to the slot's tensor. When a slot is replaced (tied
/// weights), the handle and its copies read the new one.
///   nn::Parameter weight = register_slot("weight", {out, in});
class Parameter {
 public:
  /// A handle without a parameter; it reads as an undefined tensor.
  Parameter() = default;
  explicit Parameter(SlotPtr slot) : slot_(std::make_shared<SlotPtr>(std::move(slot))) {}
  Parameter(const Parameter&) = default;
  Parameter(Parameter&&) = default;
  Parameter& operator=(Parameter&&) = default;
  // Deleted because `head->weight = embed->weight` would not tie the weights. The compiler prints
  // the next line, whose comment shows the right call:
  Parameter& operator=(const Parameter&) = delete;  // tie_slot("weight", other.slot("weight"))
  ~Parameter() = default;

  operator const at::Tensor&() const { return get(); }
  const at::Tensor& operator*() const { return get(); }
  const at::Tensor* operator->() const { return &get(); }
  bool defined() const { return get().defined(); }
  /// The parameter's slot; nullptr if there is none.
  SlotPtr slot() const { return slot_ == nullptr ? nullptr : *slot_; }

 private:
  friend class ModuleBase;
  const at::Tensor& get() const;

  std::shared_ptr<SlotPtr> slot_;
};

}  // namespace tessera::nn
TESSERA_API_END
