// Access to parts of a tensor's state that libtorch does not document: version counter, TensorImpl,
// memory and autograd metadata.
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

// The version counter of a tensor counts writes, so that autograd detects that a saved tensor was
// changed. The only public function, Tensor::_version(), throws for inference tensors. Tessera
// counts writes that no operator makes, and lets wrappers share a counter.
//
// The functions are inline, because views share counters in every call.
//
// Canary: VersionCounterCanary, a test of libtorch itself.

/// Returns the number of writes to the tensor; 0 for an inference tensor, which has no counter.
inline std::uint32_t writes_of(const at::TensorBase& tensor) {
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

/// Counts a write that was made without an operator. For an inference tensor, which has no version
/// counter, does nothing in inference mode, and otherwise throws.
inline void count_write(const at::TensorBase& tensor) {
  tensor.unsafeGetTensorImpl()->bump_version();
}

/// Makes two tensors share a version counter, so that a write to one tensor counts for both
/// tensors. Both tensors must have a counter.
inline void count_with(const at::TensorBase& tensor, const at::TensorBase& other) {
  tensor.unsafeGetTensorImpl()->set_version_counter(other.unsafeGetTensorImpl()->version_counter());
}

// An alias is another tensor with the same memory, sizes and version counter, without autograd
// state. Tensor::detach() is unsuitable, because modes see the operator and the result is a view.
// variable_data() is unsuitable, because the result has a separate version counter.
//
// Canary: AliasTensorCanary, a test of libtorch itself.

inline at::Tensor alias_tensor(const c10::TensorImpl& impl) {
  return at::Tensor(
      impl.shallow_copy_and_detach(impl.version_counter(), impl.allow_tensor_metadata_change()));
}
inline at::Tensor alias_tensor(const at::TensorBase& tensor) {
  return alias_tensor(*tensor.unsafeGetTensorImpl());
}

/// Whether libtorch permits tensor.set_data(other): if both tensors are dense, or both have the
/// same sparse layout.
inline bool may_take_state_of(const at::TensorBase& tensor, const at::TensorBase& other) {
  return tensor.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(other.key_set());
}

// The identity of a tensor: the address of its TensorImpl. Tensor::is_same() only compares two
// tensors, but tables with tensors as keys need the address.
//
// Canary: TensorIdentityCanary, a test of libtorch itself.

/// The address of a tensor's TensorImpl: equal for at::Tensor objects that share the TensorImpl.
using TensorIdentity = const c10::TensorImpl*;
inline TensorIdentity identity_of(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl();
}

/// Returns an at::Tensor of a TensorImpl. Another at::Tensor must already own the TensorImpl.
inline at::Tensor tensor_of(c10::TensorImpl& impl) {
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(&impl));
}

/// Returns the tensor's TensorImpl as class Impl, or nullptr if the TensorImpl has another class.
template <class Impl>
Impl* impl_cast(const at::TensorBase& tensor) {
  return dynamic_cast<Impl*>(tensor.unsafeGetTensorImpl());
}

// Autograd's metadata of a tensor: the name, whether the tensor is a trainable leaf, and the base
// of a view. Tensor::name() cannot set a name. is_leaf() and requires_grad() cost two virtual
// calls. Tensor::_base() works only for differentiable views.
//
// Canary: AutogradRecordCanary, a test of libtorch itself.

void set_name(const at::Tensor& tensor, const std::string& name);

/// Whether the tensor is a leaf that requires a gradient. Requires autograd metadata in `impl`.
bool is_trainable_leaf(const c10::TensorImpl& impl);

/// Returns the tensor of which `tensor` is a view, directly or indirectly; `tensor` itself if
/// `tensor` is no view.
const at::TensorBase& viewed_by(const at::TensorBase& tensor);

// Whether libtorch made a tensor from a number, as at::mul(x, 2.0) does from 2.0. Such a tensor has
// a lower priority in type promotion. The flag is only accessible through the TensorImpl.
//
// The functions are inline, because the flag is read for the cache key of every call.
//
// Canary: WrappedNumberCanary, a test of libtorch itself.

inline bool is_wrapped_number(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

inline void make_wrapped_number(const at::TensorBase& tensor) {
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
}

// guarded_view() is for a function whose result equals its argument but must be a new at::Tensor.
// The result is a view of the whole argument, and must not be changed in place.
// torch::autograd::Function makes the same kind of view, but libtorch does not export the function.
//
// Canary: GuardedViewCanary, a test of libtorch itself.

/// Returns a view of `tensor` without a grad_fn, which the caller sets. libtorch throws if the view
/// is changed in place: the view would lose its grad_fn, and autograd would not record the change
/// of `tensor`.
at::Tensor guarded_view(const at::Tensor& tensor);

// Functions that free and allocate the memory of existing tensors, and move tensors to other
// memory. PyTorch calls this storage resize. The public functions are Tensor::set_(), an operator
// that counts as a write, and set_data(), which replaces the tensor's state. Tessera's functions do
// not change version counters, so that autograd accepts tensors that were saved for backward.
//
// From 2.15 a storage can create its data on first access; these functions set ordinary memory.
//
// Canary: MemoryUnderTensorsCanary, a test of libtorch itself.

/// Replaces the memory of `storage`, and frees its old memory.
void set_memory(const c10::Storage& storage, at::DataPtr memory, std::int64_t bytes);
/// Frees the memory of `storage`. Tensors of this storage keep their sizes and strides, and must
/// not be read before set_memory() is called.
void free_memory(const c10::Storage& storage);
/// Whether the elements of an ordinary tensor have memory now (see free_memory()).
inline bool has_memory(const at::Tensor& tensor) {
  return tensor.numel() == 0 || tensor.storage().nbytes() > 0;
}

/// Makes `tensor` use the memory of `storage` from `offset` on (in elements). Sizes, strides and
/// type do not change.
void move_onto(const at::Tensor& tensor, const c10::Storage& storage, std::int64_t offset);

/// Makes a contiguous tensor of a storage, even if the storage has no memory now.
at::Tensor tensor_over(const c10::Storage& storage, std::int64_t offset, c10::IntArrayRef sizes,
                       c10::ScalarType dtype);

/// Restores sizes and strides that an operator has changed. The tensor's memory must be large
/// enough.
void restore_sizes(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides);

// The fields of c10::TensorImpl that libtorch computes from sizes and strides. Tessera computes the
// fields once and copies them into many tensors (tensor_wrapper.h). Most of the fields have a
// public getter, a virtual call; the field for "channels last, but not contiguous" has none.
//
// Canary: ShapeGeometryCanary, a test of libtorch itself.

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
