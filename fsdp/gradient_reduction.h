#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "data_mesh.h"
#include "packing.h"
#include "sharded_parameter.h"
#include "tessera/comm/communicator.h"
#include "tessera/dtensor/deferred_sums.h"
#include "whole_gradient.h"

namespace tessera::fsdp {

/// The reduction of a group's gradients under way: packed, one reduce-scatter over the dimension
/// that shards, one all-reduce of the shards over the one that replicates, divided. On a mesh of
/// one rank nothing is packed or sent.
class GradientReduction {
 public:
  /// Starts. `gradients`: of the whole `parameters`, zeros for one that has none, so that what is
  /// sent never depends on the rank. Collective over `mesh`, in `dtype`. The parameters must
  /// outlive this.
  GradientReduction(std::vector<ShardedParameter*> parameters, std::vector<WholeGradient> gradients,
                    const DataMesh& mesh, c10::ScalarType dtype, double divisor);

  /// Waits, and adds the result to the sharded parameters' gradients in their type; what another
  /// group still has to sum goes through `sums` first.
  void finish(DeferredSums& sums);

 private:
  void start(const DataMesh& mesh, c10::ScalarType dtype);
  void wait();
  std::vector<at::Tensor> shards();

  std::vector<ShardedParameter*> parameters_;
  std::vector<WholeGradient> gradients_;
  std::vector<Segment> segments_;
  std::int64_t rank_;
  double divisor_;
  comm::Communicator* replicas_ = nullptr;
  at::Tensor input_;   ///< (ranks, flat numel), kept until the collective has read it
  at::Tensor output_;  ///< (flat numel)
  comm::WorkPtr work_;
};

}  // namespace tessera::fsdp
