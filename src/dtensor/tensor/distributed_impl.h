// The TensorImpl of a distributed tensor, and its local tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "rank/transfer.h"
#include "tensor/tensor_spec.h"
#include "tessera/core/layout.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/internals/detail/tensor_wrapper.h"

namespace tessera::detail {

/// The state of a view whose base had to be redistributed to take it. The view holds a copy of the
/// viewed values, not an alias. It may be read as long as the base has not been written since; a
/// write to the view is repeated on the base.
struct DetachedView {
  /// Takes the view again from the local tensor of the base, once the base has `layout`.
  struct Replay {
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments;  ///< with local tensors
    std::size_t base;                    ///< which of them is the base
    std::size_t result;                  ///< which of the results, lists flattened, is the view
    LayoutPtr layout;
    /// The strides that the base must have, where the operator runs without a rule.
    std::optional<std::vector<std::int64_t>> strides;
  };

  /// The base's state when the view was taken or last written. The pieces of one split share it,
  /// since they do not overlap: a write to one of them leaves the others valid.
  struct Seen {
    /// nullopt where the base is an inference tensor, which has no version: it must not be written
    /// then.
    std::optional<std::uint32_t> version;
    bool written = false;  ///< by a view, whose own version bump then comes on top
  };

  at::Tensor base;
  std::shared_ptr<Seen> seen;
  /// nullptr: shares memory with `base`, which is a detached view itself.
  std::shared_ptr<Replay> replay{};

  bool is_stale() const;
  /// The view was written, and its base with it.
  void note_write();
};
using DetachedViewPtr = std::shared_ptr<DetachedView>;

/// The current state of a view of `base`, a distributed tensor.
DetachedViewPtr detached_view_of(const at::Tensor& base);

class DistributedTensorImpl;

/// Throws Error if `impl` is a detached view whose base was written since. `what`: the caller, for
/// the message.
void check_readable(const DistributedTensorImpl& impl, std::string_view what);
/// The state of `impl`, a detached view, after its sizes are changed in place: a view of what it
/// was before, with which it shares memory.
DetachedViewPtr view_of_former(const DistributedTensorImpl& impl);

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
  /// Returns false. The caller often reads memory next, as libtorch's printer does: this prepares
  /// the message of the error that follows, with a remedy.
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

// Conversions between a distributed tensor and its local one.

/// The impl of a tensor that must be distributed. Throws Error for a plain one.
const DistributedTensorImpl& impl_of_distributed(const at::Tensor& tensor);

/// The checks of from_local. They read only this rank's tensor and send nothing.
void check_plain(const at::Tensor& local);
void check_local(const at::Tensor& local, const ShardingSpec& spec,
                 const std::vector<std::int64_t>& sizes);

/// Throws Error, on all ranks alike, unless the parts of a tensor of global `sizes` with the layout
/// `gradient` are of the sizes of those with `layout`, on every rank. `asked`: the function.
void check_gradient_parts(const char* asked, const Layout& layout, const Layout& gradient,
                          c10::IntArrayRef sizes);

/// `local`, or a contiguous copy where global strides in the order of the local ones would not be
/// true of it: of an expanded gradient, a slice, or where ranks could disagree on the order.
at::Tensor dense_local(const at::Tensor& local, const ShardingSpec& sharding,
                       c10::IntArrayRef sizes);
/// A distributed tensor of global `sizes`, without autograd history, of a local one that
/// dense_local has returned. Shares memory and versions with it; its autograd state stays its own.
at::Tensor wrap_local(const at::Tensor& local, const ShardingSpec& sharding,
                      c10::IntArrayRef sizes);

}  // namespace tessera::detail
