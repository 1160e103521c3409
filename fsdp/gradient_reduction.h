#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/dtensor/deferred_sums.h"
#include "packing.h"
#include "sharded_parameter.h"
#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"
#include "whole_gradient.h"

namespace tessera::fsdp {

/// The reduction of a group's gradients under way: packed, one reduce-scatter, averaged over the
/// mesh. On a mesh of one rank nothing is packed or sent.
class GradientReduction {
 public:
  /// Takes the whole gradients of `parameters` (zeros for one that has none, so that what is sent
  /// never depends on the rank) and starts. Collective over `mesh`, in `dtype`. The parameters must
  /// outlive this.
  GradientReduction(std::vector<ShardedParameter*> parameters, const DeviceMesh& mesh,
                    c10::ScalarType dtype);

  /// Waits, and adds the mean to the sharded parameters' gradients in their type; what another
  /// group still has to sum goes through `sums` first.
  void finish(DeferredSums& sums);

 private:
  void start(const DeviceMesh& mesh, c10::ScalarType dtype);
  std::vector<at::Tensor> shards();

  std::vector<ShardedParameter*> parameters_;
  std::vector<WholeGradient> gradients_;
  std::vector<Segment> segments_;
  std::int64_t rank_;
  at::Tensor input_;   ///< (ranks, flat numel), kept until the collective has read it
  at::Tensor output_;  ///< (flat numel)
  comm::WorkPtr work_;
  std::int64_t divisor_ = 1;  ///< what the collective has not divided by
};

}  // namespace tessera::fsdp
