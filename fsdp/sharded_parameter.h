#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data_mesh.h"
#include "packing.h"
#include "shard_shape.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/parameter.h"
#include "whole_gradient.h"

namespace tessera::fsdp {

/// The memory in which shards and their gradients live.
struct ShardHome {
  c10::Device device;
  bool pinned = false;  ///< page-locked
};

/// One parameter of a unit: the slot, the shard that persists in it, and the whole tensor that
/// forward and backward see. "Whole" means over FSDP's mesh dimension: under tensor parallelism it
/// is still distributed on the other ones.
class ShardedParameter {
 public:
  /// Splits the tensor in `slot` on `dim` over `mesh` (nullopt: replicates it there) and leaves
  /// this rank's shard in the slot, moved to `home` unless it is on the meta device. Not
  /// collective.
  ShardedParameter(nn::SlotPtr slot, std::string name, const DataMesh& mesh,
                   std::optional<std::int64_t> dim, ShardHome home);

  const std::string& name() const { return name_; }
  const nn::SlotPtr& slot() const { return slot_; }
  /// Of the whole tensor's local part.
  const ShardShape& shape() const { return shape_; }
  c10::ScalarType dtype() const { return sharded_.scalar_type(); }
  c10::Device device() const { return sharded_.device(); }
  const ShardHome& home() const { return home_; }
  bool trainable() const { return sharded_.requires_grad(); }

  /// The distributed tensor that persists, and its local part: of shape().shard_sizes(rank).
  const at::Tensor& sharded() const { return sharded_; }
  const at::Tensor& shard() const { return local_tensor(sharded_); }
  /// The whole tensor; undefined until set_whole().
  const at::Tensor& whole() const { return whole_; }

  /// Grows with each write to the shard that autograd sees.
  std::uint64_t version() const;
  /// Whether somebody put another tensor into the slot (nn::to_empty, a load).
  bool is_replaced() const;
  /// Takes over such a tensor: true if there was one. Throws Error if it does not lie as the shard
  /// did.
  bool adopt();
  /// Makes the whole tensor, an autograd leaf, around its local part.
  void set_whole(const at::Tensor& local);

  void show_sharded() { slot_->set(sharded_); }
  void show_whole();

  /// Adds a gradient of the shard (plain, of any type, on any device) to the sharded parameter's,
  /// and calls its post-accumulate-grad hook, if it has one.
  void accumulate(const at::Tensor& gradient);
  /// Forgets that, and what waits to be summed over replicas.
  void drop_gradient();
  /// This rank has a gradient for what accumulate() will be given.
  void mark_used() { used_ = true; }
  bool used() const { return used_; }
  /// Whether accumulate() was called since settle_use().
  bool accumulated() const { return accumulated_; }
  /// What was accumulated is complete. Where no rank used the parameter it came from nowhere: the
  /// gradient is as undefined as it was before.
  void settle_use(bool by_any_rank);
  /// Gradients of the shard that wait to be summed over replicas.
  WholeGradient& unreduced() { return unreduced_; }
  bool has_unreduced() const { return unreduced_.local.defined(); }

 private:
  at::Tensor at_home(const at::Tensor& gradient) const;

  nn::SlotPtr slot_;
  std::string name_;
  ShardShape shape_;
  ShardHome home_;
  std::optional<ShardingSpec> whole_spec_;  ///< empty: the whole tensor is plain
  at::Tensor sharded_;
  at::Tensor whole_;
  WholeGradient unreduced_;
  bool used_ = false;
  bool accumulated_ = false;
  bool had_none_ = false;  ///< no gradient before the first accumulate() since settle_use()
};

/// The places of these parameters' shards, one after another.
std::vector<Segment> segments_of(const std::vector<ShardedParameter*>& parameters);

}  // namespace tessera::fsdp
