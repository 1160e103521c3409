// The parts of a tensor's state that libtorch does not document: its version counter, identity,
// memory and autograd record.
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

// A tensor's version counter, which counts writes, so that autograd detects that a saved tensor has
// changed. Only Tensor::_version() is public, and it throws for an inference tensor. Writes without
// an operator must be counted explicitly, and a wrapper shares the counter of its inner tensor.
//
// The functions are inline, because views share counters in every call.
//
// Canary: VersionCounterCanary.

/// The number of writes to the tensor; 0 for an inference tensor, which has no version counter.
inline std::uint32_t writes_of(const at::TensorBase& tensor) {
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

/// Counts a write that was made without an operator. For a tensor without a version counter, does
/// nothing in inference mode, and otherwise throws.
inline void count_write(const at::TensorBase& tensor) {
  tensor.unsafeGetTensorImpl()->bump_version();
}

/// Makes two tensors share a version counter, so that a write to one tensor counts for both. Both
/// must have a counter.
inline void count_with(const at::TensorBase& tensor, const at::TensorBase& other) {
  tensor.unsafeGetTensorImpl()->set_version_counter(other.unsafeGetTensorImpl()->version_counter());
}

// Aliases: another tensor with the same memory, sizes and version counter, without autograd's
// state. Tensor::detach() is an operator that modes see, and makes a view; variable_data() makes a
// tensor with its own counter.
//
// Canary: AliasTensorCanary.

inline at::Tensor alias_tensor(const c10::TensorImpl& impl) {
  return at::Tensor(
      impl.shallow_copy_and_detach(impl.version_counter(), impl.allow_tensor_metadata_change()));
}
inline at::Tensor alias_tensor(const at::TensorBase& tensor) {
  return alias_tensor(*tensor.unsafeGetTensorImpl());
}

/// Whether set_data of `tensor` may give it the state of `other`, which libtorch permits only
/// between tensors of one kind.
inline bool may_take_state_of(const at::TensorBase& tensor, const at::TensorBase& other) {
  return tensor.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(other.key_set());
}

// The identity of a tensor. Tensor::is_same() compares two handles. A table of tensors, a weak
// reference, or a conversion from an impl to a handle needs the address itself.
//
// Canary: TensorIdentityCanary.

/// Identifies a tensor: equal for all handles of one tensor, as long as one of the handles exists.
using TensorIdentity = const c10::TensorImpl*;
inline TensorIdentity identity_of(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl();
}

/// A weak reference to a tensor. A new tensor at the same address is not mistaken for it.
class WeakTensor {
 public:
  explicit WeakTensor(const at::Tensor& tensor) : impl_(tensor.getIntrusivePtr()) {}
  /// The tensor; undefined after it was freed.
  at::Tensor lock() const {
    auto impl = impl_.lock();
    return impl ? at::Tensor(std::move(impl)) : at::Tensor();
  }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> impl_;
};

/// A handle of the tensor with this impl. Another handle must own the impl.
inline at::Tensor tensor_of(c10::TensorImpl& impl) {
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(&impl));
}

/// `tensor` as a TensorImpl of class Impl, or nullptr.
template <class Impl>
Impl* impl_cast(const at::TensorBase& tensor) {
  return dynamic_cast<Impl*>(tensor.unsafeGetTensorImpl());
}

// Autograd's record of a tensor: its name, whether it is a trainable leaf, and the base of a view.
// Tensor::name() only reads. is_leaf() and requires_grad() cost two virtual calls. _base() works
// only for differentiable views.
//
// Canary: AutogradRecordCanary.

/// Sets the result of Tensor::name().
void set_name(const at::Tensor& tensor, const std::string& name);

/// Whether the tensor is a leaf that requires a gradient. `impl` must have autograd's state.
bool is_trainable_leaf(const c10::TensorImpl& impl);

/// The tensor of which `tensor` is a view, directly or indirectly; `tensor` itself if it is not a
/// view.
const at::TensorBase& viewed_by(const at::TensorBase& tensor);

// Whether libtorch made a tensor from a number, as at::mul(x, 2.0) does from 2.0. Such a tensor
// does not determine the type of a result as other tensors do. The flag is only accessible through
// the impl.
//
// The functions are inline, because the flag is read for the cache key of every call.
//
// Canary: WrappedNumberCanary.

inline bool is_wrapped_number(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

inline void make_wrapped_number(const at::TensorBase& tensor) {
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
}

// A view with the same values that must not be changed in place. A function that returns its
// argument must not return the tensor itself; torch::autograd::Function uses the same kind of view
// for its own results, and does not export it.
//
// Canary: GuardedViewCanary.

/// A view that libtorch refuses to change in place: a change would lose the view's node and change
/// `tensor` without its history. The view has no history yet.
at::Tensor guarded_view(const at::Tensor& tensor);

// Frees and allocates the memory of existing tensors, and moves tensors to other memory. PyTorch
// calls this storage resize. The public functions are Tensor::set_(), an operator that counts as a
// write, and set_data(), which replaces the tensor's state. The functions below run no operator:
// version counters do not change, so autograd does not reject the tensors that it has saved.
//
// From 2.15 a storage can materialise its
// data on access; memory set by these functions is not of that kind.
//
// Canary: MemoryUnderTensorsCanary.

/// Sets the memory of `storage`; its old memory is freed.
void set_memory(const c10::Storage& storage, at::DataPtr memory, std::int64_t bytes);
/// Frees the memory of `storage`. The tensors over this storage still have their sizes and strides,
/// and must not be read until memory is set again.
void free_memory(const c10::Storage& storage);
/// Whether the elements of a plain tensor have memory now.
inline bool has_memory(const at::Tensor& tensor) {
  return tensor.numel() == 0 || tensor.storage().nbytes() > 0;
}

/// Makes the existing object `tensor` use the memory of `storage` from `offset` (in elements).
/// Sizes, strides and type do not change.
void move_onto(const at::Tensor& tensor, const c10::Storage& storage, std::int64_t offset);

/// A contiguous tensor over a storage, which may have no memory at the moment.
at::Tensor tensor_over(const c10::Storage& storage, std::int64_t offset, c10::IntArrayRef sizes,
                       c10::ScalarType dtype);

/// Restores the sizes of a tensor that an operator has resized. Its memory must be large enough.
void restore_sizes(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides);

// The fields of a tensor that follow from its sizes and strides. They are computed once for many
// tensors and copied into each (tensor_wrapper.h). Most of the fields have a public function, which
// is a virtual call; the field for "channels last, but not contiguous" has none.
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
