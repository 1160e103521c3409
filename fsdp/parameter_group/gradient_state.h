#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "parameter/sharded_parameter.h"
#include "parameter_group/comm_context.h"
#include "parameter_group/gradient_reduction.h"
#include "parameter_group/parameter_group_shards.h"
#include "state/settings.h"

namespace tessera::fsdp {

/// A group's gradients between backward and the optimizer: those set aside, and the reduction under
/// way. Reduced gradients belong to the sharded parameters.
class GradientState {
 public:
  /// `shards` must outlive this.
  GradientState(ParameterGroupShards& shards, std::shared_ptr<const Settings> settings)
      : shards_(&shards), settings_(std::move(settings)) {}

  /// Whether an unsharded parameter has a gradient.
  bool any_unsharded() const;
  /// Forgets what a failed backward left in the unsharded parameters.
  void drop_unsharded();
  /// Also forgets the results of earlier backwards, reduced or not.
  void drop_all();
  /// Sets the unsharded gradients aside, to be added to those of later backwards
  /// (UnreducedGradient).
  void keep();
  /// Before backward comes to the unsharded parameters: what was set aside is added to by backward
  /// itself where it can be.
  void lend_kept();
  /// Whether gradients were set aside, or wait for the replicas, and a reduction now would complete
  /// them. The same on all ranks, whichever parameters they used.
  bool awaits_reduction() const;
  /// A backward has ended and may have left reductions under way (ShardedParameter).
  void show_expected();
  /// The parameters whose gradients were handed out since their use was settled.
  std::vector<ShardedParameter*> accumulated();

  /// The number of ranks that each compute a loss; the model's loss is their mean. Default: the
  /// ranks of the group's mesh.
  void set_batch_ranks(std::int64_t ranks) { batch_ranks_ = ranks; }

  /// Starts the reduction of the trainable parameters' gradients, and of what was set aside.
  /// Collective.
  void start_reduce(CommContext& context);
  /// Waits for it and hands out what came (see GradientReduction).
  void finish_reduce(CommContext& context);
  /// Forgets it.
  void forget_reduction(CommContext& context);
  /// Whether this rank's own gradient of the parameter in `slot` is kept from the last reduction,
  /// as the smallest one of a group is, and is not finite. Waits for the device.
  bool brought_nonfinite(const nn::ParameterSlot& slot) const;

 private:
  void warn_of_nonfinite(const ShardedParameter& parameter, const at::Tensor& gradient) const;
  UnshardedGradient gradient_to_reduce(ShardedParameter& parameter) const;
  ReductionOptions reduction_options() const;
  void keep_sample(const std::vector<ShardedParameter*>& parameters,
                   const std::vector<UnshardedGradient>& gradients);

  ParameterGroupShards* shards_;
  std::shared_ptr<const Settings> settings_;
  std::optional<std::int64_t> batch_ranks_;
  std::optional<GradientReduction> reduction_;
  nn::SlotPtr sampled_;  ///< the parameter of sample_
  at::Tensor sample_;    ///< its unreduced gradient; undefined: none was small enough
};

}  // namespace tessera::fsdp
