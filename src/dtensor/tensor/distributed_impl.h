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

#include "rank/rank.h"
#include "tensor/tensor_spec.h"
#include "tessera/core/detail/layout.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/internals/detail/tensor_wrapper.h"

namespace tessera::detail {

/// The state of a detached view: a view with its own copy of elements, because its base had to be
/// redistributed. The view can be read until its base is written. Writes are repeated on the base.
struct DetachedView {
  /// A call of the view operator, to be repeated on the base after its redistribution to `layout`.
  struct Replay {
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments;  ///< the view operator's arguments, as local tensors
    std::size_t base;                    ///< index of the base in `arguments`
    std::size_t result;  ///< index of the view among the operator's results, with lists flattened
    LayoutPtr layout;
    /// The strides that the base must have, if the view operator has no sharding rule.
    std::optional<std::vector<std::int64_t>> strides;
  };

  /// The base's version when the view was made or last written. All results of one split() share
  /// this record: the results do not overlap, so a write to one keeps the others valid.
  struct Seen {
    /// Version of the base; nullopt if the base is an inference tensor, which has no counter and
    /// must not be written.
    std::optional<std::uint32_t> version;
    /// Whether a view was written. If so, the base's version can be `version` or `version` + 1.
    bool written = false;
  };

  at::Tensor base;
  std::shared_ptr<Seen> seen;
  /// `replay` is nullptr if `base` is itself a detached view with which the view shares memory.
  std::shared_ptr<Replay> replay{};

  bool is_stale() const;
  /// Records that the view and the view's base were written.
  void note_write();
};
using DetachedViewPtr = std::shared_ptr<DetachedView>;

/// Makes the state (DetachedView) for a new view of the distributed tensor `base`. The view has its
/// own copy of elements.
DetachedViewPtr detached_view_of(const at::Tensor& base);

class DistributedTensorImpl;

/// Throws Error about `what` if `impl` is a detached view (own copy) whose base was written.
void check_readable(const DistributedTensorImpl& impl, std::string_view what);

/// The TensorImpl of a distributed tensor, which reports global sizes and strides, has no storage,
/// and contains the local tensor. Its key kDistributedKey is below autograd and above the backends:
/// autograd sees one ordinary tensor, and the fallback on that key (dispatch/fallback.cpp) sees
/// every operator.
///
/// The local tensor has no autograd state. It shares its version counter with this TensorImpl, so
/// that autograd detects a write to one of these two tensors if the other was saved.
class DistributedTensorImpl final : public TensorWrapper {
 public:
  DistributedTensorImpl(at::Tensor local, TensorSpecPtr spec);
  /// A cheaper constructor, for a local tensor that has `storage` and is not an inference tensor.
  DistributedTensorImpl(at::Tensor local, TensorSpecPtr spec, const c10::Storage& storage);
  /// Constructs a distributed tensor whose local tensor is pending. `stand_in` is an empty tensor
  /// of the same type and device.
  DistributedTensorImpl(TransferPtr transfer, at::Tensor stand_in, TensorSpecPtr spec);

  const at::Tensor& local() const {
    if (transfer_ != nullptr) [[unlikely]] {
      wait_for_transfer();
    }
    return local_;
  }
  const TensorSpecPtr& spec() const { return spec_; }

  /// Replaces local tensor and spec, for operators that change this tensor's shape in place.
  void replace(at::Tensor local, TensorSpecPtr spec);

  /// The DetachedView of a view with its own copy of elements, because its base had to be
  /// redistributed; nullptr for any other tensor.
  const DetachedViewPtr& detached_view() const { return detached_view_; }
  void set_detached_view(DetachedViewPtr view) { detached_view_ = std::move(view); }

  /// Whether the hook that redistributes a leaf's gradient to the leaf's layout has been installed.
  bool has_gradient_hook() const { return gradient_hook_; }
  void set_gradient_hook() { gradient_hook_ = true; }

  void release_resources() override;
  /// Returns false. Callers such as libtorch's printer read memory next, so has_storage() prepares
  /// the message of the error that follows.
  bool has_storage() const override;

 protected:
  c10::intrusive_ptr<TensorWrapper> copy() const override;
  void assign(const TensorWrapper* other) override;
  const char* tensorimpl_type_name() const override;

 private:
  void adopt_sizes();
  void wait_for_transfer() const;

  // Exactly one of local_ and transfer_ is set, except in an object that libtorch has released.
  // Both members are mutable, because waiting for a transfer does not change the tensor's value.
  mutable at::Tensor local_;
  /// The pending transfer whose result becomes local_ at the first use of local_; then nullptr.
  mutable TransferPtr transfer_;
  TensorSpecPtr spec_;
  DetachedViewPtr detached_view_;
  bool gradient_hook_ = false;
};

/// The DistributedTensorImpl of a distributed tensor, or nullptr for any other tensor.
inline DistributedTensorImpl* as_distributed(const at::TensorBase& tensor) {
  return wrapper_cast<DistributedTensorImpl>(tensor);
}

/// Makes a distributed tensor with the local tensor `local`, which must have no autograd state.
at::Tensor wrap(at::Tensor local, TensorSpecPtr spec);
/// Makes a distributed tensor whose local tensor is the pending result of `transfer`, with the
/// device and type of `like`.
at::Tensor wrap_pending(TransferPtr transfer, const at::Tensor& like, TensorSpecPtr spec);

// Functions that convert between a distributed tensor and its local tensor:

/// The DistributedTensorImpl of a tensor that must be distributed. Throws Error for a plain tensor.
const DistributedTensorImpl& impl_of_distributed(const at::Tensor& tensor);

/// Throws Error if from_local does not accept the tensor. Reads only this rank's tensor and does
/// not communicate.
void check_plain(const at::Tensor& local);
void check_local(const at::Tensor& local, const ShardingSpec& spec,
                 const std::vector<std::int64_t>& sizes);

/// Returns `local`, or a contiguous copy of `local` if no global strides describe its strides: for
/// an expanded gradient, a slice, or if ranks could disagree on the order of dimensions.
at::Tensor dense_local(const at::Tensor& local, const ShardingSpec& sharding,
                       c10::IntArrayRef sizes);
/// A distributed tensor of global `sizes`, without autograd history, from a local tensor that
/// dense_local() has returned. The result shares memory and version counter with the local tensor,
/// but has its own autograd state.
at::Tensor wrap_local(const at::Tensor& local, const ShardingSpec& sharding,
                      c10::IntArrayRef sizes);

}  // namespace tessera::detail
