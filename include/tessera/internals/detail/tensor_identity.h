// Which tensor a handle holds. Tensor::is_same() compares two handles; to look one up in a table,
// to hold it weakly, or to come from the impl back to a handle, needs the address itself.
//
// No version differs.
//
// Canary: TensorIdentityCanary.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

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

}  // namespace tessera::detail
TESSERA_API_END
