// The state of a tensor that libtorch does not document: its count of writes, identity, memory and
// autograd record.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/TensorBase.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

// A tensor's count of writes, by which autograd refuses a tensor that has changed since it was
// saved. Only Tensor::_version() is public, and it throws for an inference tensor. Writes that no
// operator makes must be counted explicitly, and a wrapper shares the counter of its inner tensor.
//
// Inline: views share counters on the hot path. No version differs.
//
// Canary: VersionCounterCanary.

/// 0 where it counts nothing: for a tensor made in inference mode.
inline std::uint32_t writes_of(const at::TensorBase& tensor) {
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

/// For a write that no operator has made. Throws for a tensor that counts nothing, but in inference
/// mode, where it does nothing.
inline void count_write(const at::TensorBase& tensor) {
  tensor.unsafeGetTensorImpl()->bump_version();
}

/// From now on a write to one is a write to both. Both must count.
inline void count_with(const at::TensorBase& tensor, const at::TensorBase& other) {
  tensor.unsafeGetTensorImpl()->set_version_counter(other.unsafeGetTensorImpl()->version_counter());
}

// Another tensor of the same memory, sizes and count of writes, without autograd's state.
// Tensor::detach() is an operator, which modes see and which counts writes as a view; and
// variable_data() counts apart.
//
// No version differs.
//
// Canary: AliasTensorCanary.

/// `allows_change`: an argument of c10::TensorImpl that libtorch, to 2.15, ignores.
/// Any tensor may be changed.
inline at::Tensor alias_tensor(const c10::TensorImpl& impl, bool allows_change) {
  return at::Tensor(impl.shallow_copy_and_detach(impl.version_counter(), allows_change));
}

/// `allows_change` as `tensor` does.
inline at::Tensor alias_tensor(const at::TensorBase& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return alias_tensor(impl, impl.allow_tensor_metadata_change());
}
inline at::Tensor alias_tensor(const at::TensorBase& tensor, bool allows_change) {
  return alias_tensor(*tensor.unsafeGetTensorImpl(), allows_change);
}

/// Whether set_data of `tensor` may give it the state of `other`: both are of one kind.
inline bool may_take_state_of(const at::TensorBase& tensor, const at::TensorBase& other) {
  return tensor.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(other.key_set());
}

// Which tensor a handle holds. Tensor::is_same() compares two handles; to look one up in a table,
// to hold it weakly, or to come from the impl back to a handle, needs the address itself.
//
// No version differs.
//
// Canary: TensorIdentityCanary.

/// Equal for handles of one tensor as long as one of them lives.
using TensorIdentity = const c10::TensorImpl*;
inline TensorIdentity identity_of(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl();
}

/// A tensor that this keeps no memory of: lock() gives it, or nullptr once it is gone. A new tensor
/// at its address is not taken for it.
class WeakTensor {
 public:
  explicit WeakTensor(const at::Tensor& tensor) : impl_(tensor.getIntrusivePtr()) {}
  /// Undefined once it is gone.
  at::Tensor lock() const {
    auto impl = impl_.lock();
    return impl ? at::Tensor(std::move(impl)) : at::Tensor();
  }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> impl_;
};

/// A handle of the tensor whose impl asks, which somebody holds.
inline at::Tensor tensor_of(c10::TensorImpl& impl) {
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(&impl));
}

/// `tensor` as a TensorImpl of this class, or nullptr.
template <class Impl>
Impl* impl_cast(const at::TensorBase& tensor) {
  return dynamic_cast<Impl*>(tensor.unsafeGetTensorImpl());
}

// What autograd has on record of a tensor: its name, whether it is a leaf that is trained, and of
// which tensor it is a view. Tensor::name() only reads; is_leaf() and requires_grad() together cost
// two virtual calls, at every first use; and _base() is of the views that have a derivative alone.
//
// No version differs.
//
// Canary: AutogradRecordCanary.

/// Tensor::name() then returns it.
void set_name(const at::Tensor& tensor, const std::string& name);

/// `impl` has autograd's state. True for a leaf alone: other tensors require a gradient by their
/// node.
bool is_trainable_leaf(const c10::TensorImpl& impl);

/// The tensor that `tensor` is a view of, however indirectly, or itself.
const at::TensorBase& viewed_by(const at::TensorBase& tensor);

// A tensor that libtorch has made of a number, as at::mul(x, 2.0) of its 2.0. It does not decide
// the type of a result as other tensors do. Only the tensor's impl says so.
//
// Inline: the key of every call asks. No version differs.
//
// Canary: WrappedNumberCanary.

inline bool is_wrapped_number(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

inline void make_wrapped_number(const at::TensorBase& tensor) {
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
}

// The same values as a view that must not be changed in place. A function that returns its argument
// must not return the tensor itself; torch::autograd::Function does the same for its own results,
// and does not export it.
//
// No version differs.
//
// Canary: GuardedViewCanary.

/// libtorch refuses to change it in place: its node would be lost, and `tensor` would have new
/// values with its old history. It has no history yet.
at::Tensor guarded_view(const at::Tensor& tensor);

// Memory that goes and comes back under tensors that stay, and tensors that move to other memory:
// what PyTorch calls storage resize. Public are Tensor::set_(), an operator, which counts as a
// write and resizes a storage that is too small, and set_data(), which replaces the tensor's state.
// Here no operator runs: no version counter moves, and autograd accepts what it has saved.
//
// No version differs in what is used. From 2.15 a storage materializes its data when it is asked
// for; memory that is set here is not of that kind.
//
// Canary: MemoryUnderTensorsCanary.

/// Sets the memory of `storage`; its old memory is freed.
void set_memory(const c10::Storage& storage, at::DataPtr memory, std::int64_t bytes);
/// Tensors keep their sizes and strides; nothing may read them then.
void free_memory(const c10::Storage& storage);
/// Whether the elements of a plain tensor have memory now.
inline bool has_memory(const at::Tensor& tensor) {
  return tensor.numel() == 0 || tensor.storage().nbytes() > 0;
}

/// `tensor`, the same object, uses the memory of `storage` from `offset` on, counted in elements.
/// Sizes, strides and type stay.
void move_onto(const at::Tensor& tensor, const c10::Storage& storage, std::int64_t offset);

/// A contiguous tensor of a storage that may be without memory now.
at::Tensor tensor_over(const c10::Storage& storage, std::int64_t offset, c10::IntArrayRef sizes,
                       c10::ScalarType dtype);

/// Gives a tensor that an operator has resized its sizes back; its memory is large enough.
void restore_sizes(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides);

// What sizes and strides imply: the fields that libtorch computes for every tensor. Computed once
// for many tensors, and copied into each (tensor_wrapper.h). A Tensor answers for most of them, one
// by one, each by a virtual call; "channels last, but not contiguous so" is in no public function.
//
// No version differs.
//
// Canary: ShapeGeometryCanary.

struct ShapeGeometry {
  std::int64_t numel = 0;
  bool contiguous = false;
  bool channels_last = false;
  bool channels_last_contiguous = false;
  bool channels_last_3d = false;
  bool channels_last_3d_contiguous = false;
  bool non_overlapping_and_dense = false;
};

ShapeGeometry shape_geometry(c10::IntArrayRef sizes, c10::IntArrayRef strides);

}  // namespace tessera::detail
TESSERA_API_END
