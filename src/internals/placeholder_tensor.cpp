#include "tessera/internals/detail/placeholder_tensor.h"

#include "tessera/internals/detail/lent_keys.h"

namespace tessera::detail {

PlaceholderTensor::PlaceholderTensor(const at::Tensor& like)
    : TensorImpl(c10::DispatchKeySet(kPlaceholderKey), like.dtype(), like.device()) {
  set_sizes_contiguous(like.sizes());
}

c10::intrusive_ptr<c10::TensorImpl> PlaceholderTensor::shallow_copy_and_detach(
    const c10::VariableVersion&, bool) const {
  refuse();
  return nullptr;  // g++ warns without: it does not believe that a virtual function never returns
}

c10::intrusive_ptr<c10::TensorImpl> PlaceholderTensor::shallow_copy_and_detach(
    c10::VariableVersion&&, bool) const {
  refuse();
  return nullptr;
}

}  // namespace tessera::detail
