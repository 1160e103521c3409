#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parameter/parameter_spec.h"
#include "parameter/pending_sum.h"
#include "parameter/shard_shape.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/parameter.h"

namespace tessera::fsdp {

/// The gradient of `unsharded`, taken off it. A gradient that is a pending sum stays one; one of
/// another layout than the parameter is redistributed, which is collective.
UnshardedGradient take_gradient(const at::Tensor& unsharded);

/// One parameter of a unit: the slot, the sharded tensor that persists in it, and the unsharded
/// tensor that forward and backward see. "Unsharded" means over FSDP's mesh dimension: under tensor
/// parallelism it is still distributed on the other ones.
class ShardedParameter {
 public:
  /// Splits the tensor in the slot and leaves this rank's shard there, moved to the spec's home
  /// unless it is on the meta device. Not collective.
  explicit ShardedParameter(const ParameterSpec& spec);

  const std::string& name() const { return name_; }
  const nn::SlotPtr& slot() const { return slot_; }
  /// Of the unsharded tensor's local part.
  const ShardShape& shape() const { return shape_; }
  c10::ScalarType dtype() const { return sharded_.scalar_type(); }
  c10::Device device() const { return sharded_.device(); }
  const ShardHome& home() const { return home_; }
  const std::optional<AllGatherExtension>& extension() const { return extension_; }
  bool trainable() const { return sharded_.requires_grad(); }

  /// The distributed tensor that persists, and its local part: of shape().shard_sizes(rank).
  const at::Tensor& sharded() const { return sharded_; }
  const at::Tensor& shard() const { return local_tensor(sharded_); }
  /// The unsharded tensor; undefined until set_unsharded().
  const at::Tensor& unsharded() const { return unsharded_; }

  /// Grows with each write to the shard that autograd sees.
  std::uint64_t version() const;
  /// Whether somebody put another tensor into the slot (nn::to_empty, a load).
  bool is_replaced() const;
  /// Takes over such a tensor: true if there was one. Throws Error if it is not laid out as the
  /// shard was.
  bool adopt();
  /// Makes the unsharded tensor, an autograd leaf, around its local part.
  void set_unsharded(const at::Tensor& local);

  /// Puts the shard, or the unsharded tensor, into the slot.
  void show_sharded() { slot_->swap(sharded_); }
  void show_unsharded();
  /// Tells the slot whether the unsharded tensor has the values.
  void set_gathered(bool gathered) { slot_->set_gathered(gathered); }

  /// Adds a gradient of the shard (plain, of any type, on any device) to the sharded parameter's,
  /// and calls its post-accumulate-grad hook, if it has one. Of an offloaded shard that is left to
  /// arrive(): the copy runs beside the host.
  void accumulate(const at::Tensor& gradient);
  /// The host has waited for what accumulate() copies to it: what was left is done.
  void arrive();
  /// A backward has failed: nothing that it left is added to a gradient any more.
  void forget_arrivals();
  /// Forgets the gradient, and what waits to be summed over replicas.
  void drop_gradient();
  /// This rank contributes to what accumulate() will be given.
  void mark_used() { used_ = true; }
  bool used() const { return used_; }
  /// Whether accumulate() was called since settle_use().
  bool accumulated() const { return accumulation_ != Accumulation::kSettled; }
  /// What was accumulated is complete. Where no rank used the parameter it came from nowhere: the
  /// gradient is as undefined as it was before.
  void settle_use(bool by_any_rank);
  /// Gradients of the shard that wait to be summed over replicas.
  UnshardedGradient& unreduced() { return unreduced_; }
  bool has_unreduced() const { return unreduced_.local.defined(); }
  /// What the ranks' gradients still lack when they are reduced.
  PendingSum& pending_sum() { return pending_sum_; }

 private:
  /// What accumulate() has done since the ranks last agreed on which parameters they used.
  enum class Accumulation : std::uint8_t {
    kSettled,  ///< nothing
    kStarted,  ///< made a gradient where there was none
    kAdded,    ///< added to an earlier one
  };

  at::Tensor at_home(const at::Tensor& gradient) const;
  void call_hook();

  nn::SlotPtr slot_;
  std::string name_;
  ShardShape shape_;
  ShardHome home_;
  std::optional<AllGatherExtension> extension_;
  std::optional<ShardingSpec> unsharded_spec_;  ///< empty: the unsharded tensor is plain
  PendingSum pending_sum_;
  at::Tensor sharded_;
  at::Tensor unsharded_;
  UnshardedGradient unreduced_;
  std::vector<at::Tensor> arriving_;  ///< on the host, to be added to the gradient
  bool awaited_ = false;              ///< arrive() has something to do
  Accumulation accumulation_ = Accumulation::kSettled;
  bool used_ = false;  ///< on this rank; what the ranks tell each other
};

}  // namespace tessera::fsdp
