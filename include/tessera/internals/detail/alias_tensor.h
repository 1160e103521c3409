// Another tensor of the same memory, sizes and count of writes, without autograd's state.
// Tensor::detach() is an operator, which modes see and which counts writes as a view; and
// variable_data() counts apart.
//
// No version differs.
//
// Canary: AliasTensorCanary.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// `allows_change`: asked for by the interface of c10::TensorImpl; libtorch to 2.15 leaves it out
/// of account, and any tensor may be changed.
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

}  // namespace tessera::detail
TESSERA_API_END
