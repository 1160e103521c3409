#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "comm/comm_context.h"
#include "group/gradient_reduction.h"
#include "group/group_shards.h"
#include "parameter/sharded_parameter.h"
#include "state/settings.h"

namespace tessera::fsdp {

/// What a group has of gradients between backward and the optimizer: those set aside, and the
/// reduction under way. Reduced ones are the sharded parameters'.
class GradientState {
 public:
  /// `shards` must outlive this.
  GradientState(GroupShards& shards, std::shared_ptr<const Settings> settings)
      : shards_(&shards), settings_(std::move(settings)) {}

  /// Whether an unsharded parameter has a gradient.
  bool any_unsharded() const;
  /// Forgets what a backward that failed left in the unsharded parameters.
  void drop_unsharded();
  /// And all that earlier ones have made of them, reduced or not.
  void drop_all();
  /// Sets the unsharded gradients aside, to be added to those of later backwards.
  void keep();
  /// Whether some were set aside, or wait for the replicas, that a reduction now would complete.
  /// The same on all ranks, whichever parameters they used.
  bool awaits_reduction() const;
  /// Forgets what was set aside for a parameter of this group.
  void drop_kept(const nn::ParameterSlot& slot);
  /// The parameters whose gradients were handed out since their use was settled.
  std::vector<ShardedParameter*> accumulated();

  /// Starts the reduction of the trainable parameters' gradients, and of what was set aside.
  /// Collective.
  void start_reduce(CommContext& context);
  /// Waits for it and hands out what came (see GradientReduction).
  void finish_reduce(CommContext& context);
  /// Forgets it.
  void forget_reduction(CommContext& context);

 private:
  struct KeptGradient {
    UnshardedGradient sum;
    bool expected = false;  ///< the parameter was trainable, though this rank may not have used it
  };

  ReductionOptions reduction_options() const;

  GroupShards* shards_;
  std::shared_ptr<const Settings> settings_;
  std::vector<KeptGradient> kept_;  ///< beside the parameters, or empty
  std::optional<GradientReduction> reduction_;
};

}  // namespace tessera::fsdp
