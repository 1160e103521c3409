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

// The version counter of a tensor counts writes, for autograd's checks. The public
// Tensor::_version() cannot count a write or share a counter, and throws for inference tensors. The
// functions are inline, because every view shares a counter.
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
// state. Tensor::detach() makes a view by an operator. variable_data() makes a new version counter.
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

// The identity of a tensor: the address of its TensorImpl. The public Tensor::is_same() gives no
// key for tables.
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
// of a view. libtorch's public functions are slower, set no name, and return the base only for
// differentiable views.
//
// Canary: AutogradRecordCanary, a test of libtorch itself.

void set_name(const at::Tensor& tensor, const std::string& name);

/// Whether the tensor is a leaf that requires a gradient. Requires autograd metadata in `impl`.
bool is_trainable_leaf(const c10::TensorImpl& impl);

/// Returns the tensor of which `tensor` is a view, directly or indirectly; `tensor` itself if
/// `tensor` is no view.
const at::TensorBase& viewed_by(const at::TensorBase& tensor);

// Whether libtorch made a tensor from a number, such as 2.0 in at::mul(x, 2.0). The flag gives the
// tensor a lower priority in type promotion. The functions are inline, because each call reads the
// flag for its cache key.
//
// Canary: WrappedNumberCanary, a test of libtorch itself.

inline bool is_wrapped_number(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

inline void make_wrapped_number(const at::TensorBase& tensor) {
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
}

// guarded_view() makes a new at::Tensor for a function whose result equals its argument. The result
// is a view, and must not be changed in place. libtorch does not export its function for such
// views.
//
// Canary: GuardedViewCanary, a test of libtorch itself.

/// Returns a view of `tensor`; the caller sets the grad_fn. libtorch throws if the view is changed
/// in place, because the view would lose the grad_fn.
at::Tensor guarded_view(const at::Tensor& tensor);

// Functions that free, allocate and replace the memory of existing tensors (PyTorch's storage
// resize). The functions do not change version counters, so that autograd accepts saved tensors.
// The public set_() counts as a write, and set_data() replaces the tensor's state.
//
// From libtorch 2.15 a storage can create its data on first access; these functions set ordinary
// memory.
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

// The fields of c10::TensorImpl that libtorch computes from sizes and strides. Tessera copies the
// fields from tensor to tensor (tensor_wrapper.h). libtorch's public getters are slower virtual
// calls, and one of the fields has no public getter.
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
