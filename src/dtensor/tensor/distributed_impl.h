#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "rank/transfer.h"
#include "tensor/detached_view.h"
#include "tensor/tensor_spec.h"
#include "tessera/internals/detail/tensor_wrapper.h"

namespace tessera::detail {

/// The TensorImpl of a distributed tensor: global sizes and strides outside, no storage, the local
/// tensor inside. Its key kDistributedKey is below autograd and above the backends: autograd sees
/// one ordinary tensor, and the fallback on that key (dispatch/fallback.cpp) sees every operator.
///
/// The local tensor has no autograd state. It shares its version counter with the wrapper, so that
/// autograd notices a write to either where it has saved the other.
class DistributedTensorImpl final : public TensorWrapper {
 public:
  DistributedTensorImpl(at::Tensor local, TensorSpecPtr spec);
  /// The same, cheaper, for a local tensor with `storage` that is no inference tensor.
  DistributedTensorImpl(at::Tensor local, TensorSpecPtr spec, const c10::Storage& storage);
  /// For a local tensor that a transfer will give. `stand_in`: an empty one of its type and device.
  DistributedTensorImpl(TransferPtr transfer, at::Tensor stand_in, TensorSpecPtr spec);

  const at::Tensor& local() const {
    if (transfer_ != nullptr) [[unlikely]] {
      wait_for_transfer();
    }
    return local_;
  }
  const TensorSpecPtr& spec() const { return spec_; }

  /// Replaces local tensor and spec: for operators that change a tensor's shape in place.
  void replace(at::Tensor local, TensorSpecPtr spec);

  /// Set if this is a view that holds a copy, because its base had to be redistributed.
  const DetachedViewPtr& detached_view() const { return detached_view_; }
  void set_detached_view(DetachedViewPtr view) { detached_view_ = std::move(view); }

  /// Set once the hook that brings a leaf's gradient to the leaf's layout is installed.
  bool has_gradient_hook() const { return gradient_hook_; }
  void set_gradient_hook() { gradient_hook_ = true; }

  void release_resources() override;
  /// False. The caller is often about to read memory, as libtorch's printer is: prepares the
  /// message of the error that follows, which then says what to do instead.
  bool has_storage() const override;

 protected:
  c10::intrusive_ptr<TensorWrapper> copy() const override;
  void assign(const TensorWrapper* other) override;
  const char* tensorimpl_type_name() const override;

 private:
  void adopt_sizes();
  void wait_for_transfer() const;

  // Exactly one of the first two is set, except in a wrapper that libtorch has released. They
  // change in const functions because waiting is no change of the value.
  mutable at::Tensor local_;
  mutable TransferPtr transfer_;  ///< of local_, until its first use
  TensorSpecPtr spec_;
  DetachedViewPtr detached_view_;
  bool gradient_hook_ = false;
};

/// The impl of a distributed tensor, or nullptr for any other tensor.
inline DistributedTensorImpl* as_distributed(const at::TensorBase& tensor) {
  return wrapper_cast<DistributedTensorImpl>(tensor);
}

/// A distributed tensor with local tensor `local`, which must have no autograd state.
at::Tensor wrap(at::Tensor local, TensorSpecPtr spec);
/// One whose local tensor, of the device and type of `like`, the transfer will give.
at::Tensor wrap_pending(TransferPtr transfer, const at::Tensor& like, TensorSpecPtr spec);

}  // namespace tessera::detail
