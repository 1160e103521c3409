#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective_hooks.h"
#include "communication.h"
#include "data_mesh.h"
#include "packing.h"
#include "sharded_parameter.h"
#include "tessera/comm/communicator.h"
#include "whole_gradient.h"

namespace tessera::fsdp {

/// How a group's gradients are reduced.
struct ReductionOptions {
  c10::ScalarType dtype;
  double divisor = 1;  ///< of the sum over all ranks
  bool all_reduce =
      true;  ///< false: over replicas in a later reduction, with what comes until then
  bool force_sum = false;  ///< no part of the division comes before the sum
  std::shared_ptr<const CollectiveHooks> hooks;
  std::string label;  ///< of the unit, for messages
};

/// The reduction of a group's gradients under way: one reduce-scatter over the dimension that
/// shards, one all-reduce of the shards over the one that replicates, divided. Gradients go from
/// where autograd put them where the communicator can and the rows divide, else packed. On a mesh
/// of one rank nothing is packed or sent.
class GradientReduction {
 public:
  /// Starts. `gradients`: of the whole `parameters`, zeros for one that has none, so that what is
  /// sent never depends on the rank. Collective over `mesh`. The parameters must outlive this.
  GradientReduction(std::vector<ShardedParameter*> parameters, std::vector<WholeGradient> gradients,
                    const DataMesh& mesh, ReductionOptions options, Communication& communication);

  /// Waits, and adds the result to the sharded parameters' gradients in their type; what another
  /// group still has to sum goes through communication.sums() first. Works in the
  /// reduce-scatter lane; on one rank, where gradients are still compute's, in that one. From the
  /// hook on in the hook's, if it has one.
  void finish(Communication& communication);

 private:
  bool in_place() const;
  void start(Communication& communication);
  void reduce_in_place(Communication& communication);
  void reduce_packed(Communication& communication);
  c10::TensorOptions tensor_options() const;
  at::Tensor shard(std::size_t index) const;
  void wait(Communication& communication);
  void join_earlier();
  /// nullptr if that is left to a later reduction.
  comm::WorkPtr start_all_reduce();
  /// False if that is left to a later reduction.
  bool reduce_over_replicas();
  void hand_out_reduced(Communication& communication);
  void hand_out_alone(Communication& communication);
  void hand_out(std::size_t index, const at::Tensor& gradient, Communication& communication);

  std::vector<ShardedParameter*> parameters_;
  std::vector<WholeGradient> gradients_;
  DataMesh mesh_;
  ReductionOptions options_;
  std::vector<Segment> segments_;
  double pre_divisor_ = 1;                    ///< divided by before the sum
  std::vector<at::Tensor> held_;              ///< gradients that the collective reads
  std::optional<BufferPool::Buffer> buffer_;  ///< or their packed copy, (ranks, flat numel)
  at::Tensor output_;                         ///< (flat numel)
  comm::WorkPtr work_;
};

}  // namespace tessera::fsdp
