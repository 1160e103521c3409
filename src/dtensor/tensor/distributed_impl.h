// DistributedTensorImpl: the TensorImpl of a distributed tensor, which contains the local tensor.
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
#include "tessera/core/detail/layout.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/internals/detail/tensor_wrapper.h"

namespace tessera::detail {

/// The state of a view that has a copy, because its base had to be redistributed. The view may be
/// read until its base is written; a write to the view is repeated on the base.
struct DetachedView {
  /// Takes the view from the base's local tensor, redistributed to `layout`.
  struct Replay {
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments;  ///< the operator's arguments, with local tensors
    std::size_t base;                    ///< index of the base in `arguments`
    std::size_t result;                  ///< index of the view among the results, with lists
                                         ///< flattened
    LayoutPtr layout;
    /// The strides that the base must have, for an operator without a rule.
    std::optional<std::vector<std::int64_t>> strides;
  };

  /// The base's state when the view was taken or last written. The pieces of one split share it,
  /// since they do not overlap: a write to one piece does not invalidate the others.
  struct Seen {
    /// nullopt: the base is an inference tensor, without a counter; it must not be written.
    std::optional<std::uint32_t> version;
    bool written = false;  ///< whether a view was written, whose own version bump then adds one
  };

  at::Tensor base;
  std::shared_ptr<Seen> seen;
  /// nullptr: the view shares memory with `base`, which is itself a detached view.
  std::shared_ptr<Replay> replay{};

  bool is_stale() const;
  /// Records that the view was written, and its base with it.
  void note_write();
};
using DetachedViewPtr = std::shared_ptr<DetachedView>;

/// A new state for a view of the distributed tensor `base`.
DetachedViewPtr detached_view_of(const at::Tensor& base);

class DistributedTensorImpl;

/// Throws Error, naming `what`, if `impl` is a detached view whose base has been written.
void check_readable(const DistributedTensorImpl& impl, std::string_view what);
/// The state of the detached view `impl` after an in-place change of its sizes: a view of its
/// former self, with which it shares memory.
DetachedViewPtr view_of_former(const DistributedTensorImpl& impl);

/// The TensorImpl of a distributed tensor: it reports global sizes and strides, has no storage, and
/// contains the local tensor. Its key kDistributedKey is below autograd and above the backends:
/// autograd sees one ordinary tensor, and the fallback on that key (dispatch/fallback.cpp) sees
/// every operator.
///
/// The local tensor has no autograd state. It shares its version counter with the wrapper, so that
/// autograd detects a write to either of them if the other was saved.
class DistributedTensorImpl final : public TensorWrapper {
 public:
  DistributedTensorImpl(at::Tensor local, TensorSpecPtr spec);
  /// A cheaper constructor for a local tensor with `storage` that is not an inference tensor.
  DistributedTensorImpl(at::Tensor local, TensorSpecPtr spec, const c10::Storage& storage);
  /// For a pending local tensor; `stand_in`: an empty tensor of the same type and device.
  DistributedTensorImpl(TransferPtr transfer, at::Tensor stand_in, TensorSpecPtr spec);

  const at::Tensor& local() const {
    if (transfer_ != nullptr) [[unlikely]] {
      wait_for_transfer();
    }
    return local_;
  }
  const TensorSpecPtr& spec() const { return spec_; }

  /// Replaces local tensor and spec, for operators that change a tensor's shape in place.
  void replace(at::Tensor local, TensorSpecPtr spec);

  /// Set if this tensor is a view with its own copy, because its base had to be redistributed.
  const DetachedViewPtr& detached_view() const { return detached_view_; }
  void set_detached_view(DetachedViewPtr view) { detached_view_ = std::move(view); }

  /// Set after the hook that redistributes a leaf's gradient to the leaf's layout is installed.
  bool has_gradient_hook() const { return gradient_hook_; }
  void set_gradient_hook() { gradient_hook_ = true; }

  void release_resources() override;
  /// Returns false. Callers such as libtorch's printer read memory next, so this prepares the
  /// message, with advice, of the error that follows.
  bool has_storage() const override;

 protected:
  c10::intrusive_ptr<TensorWrapper> copy() const override;
  void assign(const TensorWrapper* other) override;
  const char* tensorimpl_type_name() const override;

 private:
  void adopt_sizes();
  void wait_for_transfer() const;

  // Exactly one of local_ and transfer_ is set, except in a wrapper that libtorch has released.
  // They are mutable because waiting does not change the value.
  mutable at::Tensor local_;
  mutable TransferPtr transfer_;  ///< produces local_; set until its first use
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
/// A distributed tensor with a pending local tensor, of the device and type of `like`.
at::Tensor wrap_pending(TransferPtr transfer, const at::Tensor& like, TensorSpecPtr spec);

// Conversions between a distributed tensor and its local tensor.

/// The impl of a tensor that must be distributed. Throws Error for a plain tensor.
const DistributedTensorImpl& impl_of_distributed(const at::Tensor& tensor);

/// The checks of from_local. They read only this rank's tensor and do not communicate.
void check_plain(const at::Tensor& local);
void check_local(const at::Tensor& local, const ShardingSpec& spec,
                 const std::vector<std::int64_t>& sizes);

/// Throws Error, on all ranks, naming `asked`, unless parts of a tensor with global `sizes` have
/// the same sizes under both layouts on every rank.
void check_gradient_parts(const char* asked, const Layout& layout, const Layout& gradient,
                          c10::IntArrayRef sizes);

/// `local`, or a contiguous copy if its strides cannot be described by global strides: for an
/// expanded gradient, a slice, or if ranks could disagree on the order of dimensions.
at::Tensor dense_local(const at::Tensor& local, const ShardingSpec& sharding,
                       c10::IntArrayRef sizes);
/// A distributed tensor of global `sizes`, without autograd history, from a local tensor that
/// dense_local() has returned. It shares memory and version counter with the local tensor, but has
/// its own autograd state.
at::Tensor wrap_local(const at::Tensor& local, const ShardingSpec& sharding,
                      c10::IntArrayRef sizes);

}  // namespace tessera::detail
