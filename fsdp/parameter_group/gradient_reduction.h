#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "comm/data_mesh.h"
#include "parameter/sharded_parameter.h"
#include "parameter_group/comm_context.h"
#include "parameter_group/flat_buffer_layout.h"
#include "state/settings.h"
#include "tessera/comm/communicator.h"

namespace tessera::fsdp {

/// How a group's gradients are reduced, by the settings when the reduction started.
struct ReductionOptions {
  c10::ScalarType dtype;
  double divisor = 1;  ///< the sum over all ranks is divided by it
  bool all_reduce =
      true;  ///< false: over replicas in a later reduction, with what comes until then
  bool force_sum = false;                    ///< no part of the division comes before the sum
  std::shared_ptr<const Settings> settings;  ///< for the label and the hooks
};

/// The reduction of a group's gradients under way: one reduce-scatter over the dimension that
/// shards, one all-reduce of the shards over the one that replicates, divided. Gradients are sent
/// from autograd's memory if the communicator can and the rows divide evenly, else packed. On a
/// mesh of one rank nothing is packed or sent.
class GradientReduction {
 public:
  /// Starts. `gradients`: of the unsharded `parameters`, zeros for one that has none, so that what
  /// is sent never depends on the rank. Collective over `mesh`. The parameters must outlive this.
  GradientReduction(std::vector<ShardedParameter*> parameters,
                    std::vector<UnshardedGradient> gradients, const DataMesh& mesh,
                    ReductionOptions options, CommContext& context);

  /// Waits, and adds the result to the sharded parameters' gradients in their type; what another
  /// group still has to sum goes through context.sums() first. Works in the reduce-scatter lane; on
  /// one rank, whose gradients are still compute's, in the compute lane. From the hook on in the
  /// hook's lane, if it has one.
  void finish(CommContext& context);

 private:
  const CollectiveHooks& hooks() const { return options_.settings->hooks; }
  const std::string& label() const { return options_.settings->label; }
  bool in_place() const;
  void start(CommContext& context);
  void reduce_in_place(CommContext& context);
  void reduce_packed(CommContext& context);
  c10::TensorOptions tensor_options() const;
  at::Tensor shard(std::size_t index) const;
  void wait(CommContext& context);
  void join_earlier();
  /// nullptr if that is left to a later reduction.
  comm::WorkPtr start_all_reduce();
  /// False if that is left to a later reduction.
  bool reduce_over_replicas();
  void hand_out_reduced(CommContext& context);
  void cast_alone();
  void hand_out_alone(CommContext& context);
  void hand_out(std::size_t index, const at::Tensor& gradient, CommContext& context);

  std::vector<ShardedParameter*> parameters_;
  std::vector<UnshardedGradient> gradients_;
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
