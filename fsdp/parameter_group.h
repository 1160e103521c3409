#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "data_mesh.h"
#include "gradient_reduction.h"
#include "neighbour_shard.h"
#include "packing.h"
#include "reusable_storage.h"
#include "sharded_parameter.h"
#include "tessera/comm/communicator.h"
#include "tessera/dtensor/deferred_sums.h"
#include "tessera/fsdp/fully_shard.h"

namespace tessera::fsdp {

/// Parameters of one type that are gathered in one all-gather and reduced in one reduce-scatter.
///
/// The shards lie one after another in one flat buffer, each padded to rank 0's size, so that with
/// equal types the buffer itself is what all-gather sends. The whole tensors lie in one storage,
/// which is freed when the group is resharded. On a mesh of one rank nothing is communicated, and
/// without a change of type nothing copied: the whole tensor is the shard.
class ParameterGroup {
 public:
  /// All of one type, on the device of `mesh` or the meta device.
  ParameterGroup(std::vector<ShardedParameter> parameters, DataMesh mesh, const Options& options);

  /// Takes over tensors that were put into the slots since and lays the shards out. To be called
  /// before the first unshard of an iteration. Throws Error, naming them, for parameters that are
  /// still on the meta device.
  void prepare();

  bool unsharded() const { return unsharded_; }
  /// Starts the all-gather, unless there is nothing to gather. Collective.
  void start_unshard();
  /// Puts the whole tensors into the slots. Collective unless started before.
  void unshard();
  /// Puts the shards into the slots and frees the whole tensors' memory.
  void reshard();
  /// The same between forward and backward: keeps this rank's part for its neighbours, if so asked.
  void reshard_after_forward();

  /// Whether a whole parameter has a gradient.
  bool has_gradients() const;
  /// Sets the whole gradients aside, to be added to those of later backwards.
  void keep_gradients();
  /// Starts the reduction of the trainable parameters' gradients, and of what was set aside.
  /// Collective.
  void start_reduce();
  /// What the sum of all ranks' gradients is divided by; at first the number of ranks.
  void set_gradient_divisor(double divisor) { gradient_divisor_ = divisor; }
  /// Waits for it and hands out what came (see GradientReduction).
  void finish_reduce(DeferredSums& sums);

 private:
  const ShardHome& home() const { return parameters_.front().home(); }
  /// Whether the whole tensors are the shards.
  bool shares_memory() const {
    return mesh_.shard.size() == 1 && compute_dtype_ == dtype_ && home().device == device_;
  }
  bool has_flat() const { return mesh_.shard.size() > 1 || home().pinned; }
  bool laid_out() const;
  void check_devices() const;
  void lay_out_shards();
  void make_whole_tensors();
  void fill_whole_tensors();
  void wait_for_gather();
  void show_sharded();

  std::vector<ShardedParameter> parameters_;
  DataMesh mesh_;
  c10::Device device_;  ///< of computation
  c10::ScalarType dtype_;
  c10::ScalarType compute_dtype_;
  c10::ScalarType reduce_dtype_;

  std::vector<Segment> segments_;
  at::Tensor flat_;  ///< this rank's shards
  ReusableStorage whole_storage_;
  at::Tensor whole_flat_;  ///< all of the storage
  std::vector<at::Tensor> whole_locals_;
  NeighbourShard neighbours_;
  bool unsharded_ = false;

  at::Tensor send_;      ///< of the all-gather under way
  at::Tensor gathered_;  ///< (ranks, flat numel)
  comm::WorkPtr gather_;
  std::vector<WholeGradient> kept_gradients_;  ///< beside parameters_, or empty
  std::optional<GradientReduction> reduction_;
  double gradient_divisor_;
};

}  // namespace tessera::fsdp
