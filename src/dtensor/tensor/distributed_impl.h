#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <typeinfo>
#include <utility>

#include "rank/transfer.h"
#include "tensor/detached_view.h"
#include "tensor/tensor_spec.h"

namespace tessera::detail {

/// The TensorImpl of a distributed tensor: global sizes and strides outside, no storage, the local
/// tensor inside. Its key DispatchKey::Fake is below autograd and above the backends: autograd sees
/// one ordinary tensor, and the fallback on that key (dispatch/fallback.cpp) sees every operator.
///
/// The local tensor has no autograd state. It shares its version counter with the wrapper, so that
/// autograd notices a write to either where it has saved the other.
class DistributedTensorImpl final : public c10::TensorImpl {
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

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version_counter, bool allow_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                         bool allow_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& other) override;
  void release_resources() override;
  /// False. Whoever asks is often about to read memory, as libtorch's printer is: prepares the
  /// message of what that throws to say what to do instead.
  bool has_storage() const override;

 protected:
  const char* tensorimpl_type_name() const override;

 private:
  void adopt_metadata();
  void adopt_sizes();
  void wait_for_transfer() const;
  c10::intrusive_ptr<DistributedTensorImpl> copy(bool allow_change) const;

  // Exactly one of the first two is set, except in a wrapper that libtorch has released. They
  // change in const functions because waiting is no change of the value.
  mutable at::Tensor local_;
  mutable TransferPtr transfer_;  ///< of local_, until its first use
  TensorSpecPtr spec_;
  DetachedViewPtr detached_view_;
  bool gradient_hook_ = false;
};

/// The impl of a distributed tensor, or nullptr for any other tensor. By type, not by key: set_data
/// copies keys.
inline DistributedTensorImpl* as_distributed(const at::TensorBase& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (!impl->key_set().has(c10::DispatchKey::Fake)) {
    return nullptr;
  }
  return &typeid(*impl) == &typeid(DistributedTensorImpl)
             ? static_cast<DistributedTensorImpl*>(impl)
             : nullptr;
}

/// Makes autograd differentiate a write through a view by replaying the view, which the fallback
/// understands, instead of by as_strided, which needs a storage. A setting of the thread. Set for
/// every wrapper, since guards of libtorch restore the state of a thread.
void replay_views();

/// A distributed tensor with local tensor `local`, which must have no autograd state.
at::Tensor wrap(at::Tensor local, TensorSpecPtr spec);
/// One whose local tensor, of the device and type of `like`, the transfer will give.
at::Tensor wrap_pending(TransferPtr transfer, const at::Tensor& like, TensorSpecPtr spec);

/// `local` in its own impl, without autograd state, sharing storage and version counter.
at::Tensor plain_alias(const at::Tensor& local);

}  // namespace tessera::detail
