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

/// A view with its own copy of the elements, because the base had to be redistributed. Writes to
/// the view are repeated on the base. A write to the base makes the view unreadable.
struct DetachedView {
  /// The call of the view operator, to be repeated on the base after redistribution to `layout`.
  struct Replay {
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments;  ///< the operator's arguments, as local tensors
    std::size_t base;                    ///< index of the base in `arguments`
    std::size_t result;                  ///< index of the view among all tensors that `op` returns
    LayoutPtr layout;
    /// The strides that the redistributed base needs if the view operator has no sharding rule.
    std::optional<std::vector<std::int64_t>> strides;
  };

  /// The version of the base when a view was made or last written. All results of one split() share
  /// a Seen, because the results do not overlap.
  struct Seen {
    /// The version counter of the base; nullopt if the base is an inference tensor, which has no
    /// version counter and must not be written.
    std::optional<std::uint32_t> version;
    /// Whether a view was written. The write can increment the base's version counter, so `version`
    /// + 1 is then valid, too.
    bool written = false;
  };

  at::Tensor base;
  std::shared_ptr<Seen> seen;
  /// How to repeat a write to the view on `base`. nullptr if `base` is itself a detached view, with
  /// which the view shares memory.
  std::shared_ptr<Replay> replay{};

  bool is_stale() const;
  void note_write();
};
using DetachedViewPtr = std::shared_ptr<DetachedView>;

DetachedViewPtr detached_view_of(const at::Tensor& base);

class DistributedTensorImpl;

/// Throws Error if `impl` is a detached view whose base was written. `what`: the operator's name.
void check_readable(const DistributedTensorImpl& impl, std::string_view what);

/// The TensorImpl of a distributed tensor: global sizes and strides, a local tensor, and no
/// storage. kDistributedKey is below autograd, so autograd sees one ordinary tensor. The local
/// tensor shares the version counter, so that autograd detects a write to either tensor.
class DistributedTensorImpl final : public TensorWrapper {
 public:
  DistributedTensorImpl(at::Tensor local, TensorSpecPtr spec);
  /// A cheaper constructor, for a `local` that has `storage` and is not an inference tensor.
  DistributedTensorImpl(at::Tensor local, TensorSpecPtr spec, const c10::Storage& storage);
  /// Constructs a distributed tensor whose local tensor is pending. `stand_in` is an empty tensor
  /// with the dtype and device of the local tensor.
  DistributedTensorImpl(TransferPtr transfer, at::Tensor stand_in, TensorSpecPtr spec);

  const at::Tensor& local() const {
    if (transfer_ != nullptr) [[unlikely]] {
      wait_for_transfer();
    }
    return local_;
  }
  const TensorSpecPtr& spec() const { return spec_; }

  /// Replaces local tensor and spec. Used by operators that change a tensor's shape in place.
  void replace(at::Tensor local, TensorSpecPtr spec);

  /// The state of a detached view (a view with its own copy of the base's elements); nullptr for
  /// all other tensors.
  const DetachedViewPtr& detached_view() const { return detached_view_; }
  void set_detached_view(DetachedViewPtr view) { detached_view_ = std::move(view); }

  /// Whether the hook is installed that redistributes the leaf's gradient to the leaf's layout.
  bool has_gradient_hook() const { return gradient_hook_; }
  void set_gradient_hook() { gradient_hook_ = true; }

  void release_resources() override;
  /// Returns false. Also sets the message of the error that a later access to the tensor's storage
  /// throws, for example by libtorch's printer.
  bool has_storage() const override;

 protected:
  c10::intrusive_ptr<TensorWrapper> copy() const override;
  void assign(const TensorWrapper* other) override;
  const char* tensorimpl_type_name() const override;

 private:
  void adopt_sizes();
  void wait_for_transfer() const;

  // Either local_ or transfer_ is set. release_resources() resets both. Both are mutable, because
  // local(), which is const, waits for the transfer.
  mutable at::Tensor local_;
  /// The asynchronous redistribution that will set local_; nullptr after local_ is set.
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
/// device and dtype of `like`.
at::Tensor wrap_pending(TransferPtr transfer, const at::Tensor& like, TensorSpecPtr spec);

/// Returns the DistributedTensorImpl of a tensor; throws Error for a plain tensor.
const DistributedTensorImpl& impl_of_distributed(const at::Tensor& tensor);

/// Throws Error for a tensor that from_local() does not accept: an undefined or distributed tensor.
void check_plain(const at::Tensor& local);
void check_local(const at::Tensor& local, const ShardingSpec& spec,
                 const std::vector<std::int64_t>& sizes);

/// Returns `local`, or a contiguous copy if its strides fit no global strides (an expanded
/// gradient, a slice), or if ranks could have different orders of dimensions in memory.
at::Tensor dense_local(const at::Tensor& local, const ShardingSpec& sharding,
                       c10::IntArrayRef sizes);
/// Makes a distributed tensor of global `sizes` from a result of dense_local(). Both tensors share
/// memory and the version counter, but the distributed tensor has no autograd history.
at::Tensor wrap_local(const at::Tensor& local, const ShardingSpec& sharding,
                      c10::IntArrayRef sizes);

}  // namespace tessera::detail
