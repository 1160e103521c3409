#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tessera/dtensor/deferred_sums.h"
#include "gradient_reduction.h"
#include "packing.h"
#include "reusable_storage.h"
#include "sharded_parameter.h"
#include "tessera/comm/communicator.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/device_mesh.h"

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
  ParameterGroup(std::vector<ShardedParameter> parameters, DeviceMesh mesh,
                 const MixedPrecisionPolicy& policy);

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

  /// Whether a whole parameter has a gradient.
  bool has_gradients() const;
  /// Starts the reduction of the trainable parameters' gradients. Collective.
  void start_reduce();
  /// Waits for it and hands out what came (see GradientReduction).
  void finish_reduce(DeferredSums& sums);

 private:
  bool shares_memory() const { return mesh_.size() == 1 && compute_dtype_ == dtype_; }
  bool laid_out() const;
  void check_not_meta() const;
  void lay_out_shards();
  void make_whole_tensors();
  void fill_whole_tensors();

  std::vector<ShardedParameter> parameters_;
  DeviceMesh mesh_;
  c10::ScalarType dtype_;
  c10::ScalarType compute_dtype_;
  c10::ScalarType reduce_dtype_;

  std::vector<Segment> segments_;
  at::Tensor flat_;  ///< this rank's shards
  ReusableStorage whole_storage_;
  std::vector<at::Tensor> whole_locals_;
  bool unsharded_ = false;

  at::Tensor send_;      ///< of the all-gather under way
  at::Tensor gathered_;  ///< (ranks, flat numel)
  comm::WorkPtr gather_;
  std::optional<GradientReduction> reduction_;
};

}  // namespace tessera::fsdp
