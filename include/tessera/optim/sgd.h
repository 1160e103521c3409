#pragma once

#include <vector>

#include "tessera/optim/slot_optimizer.h"

namespace tessera::optim {

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0.0;
  bool nesterov = false;      ///< needs momentum
  double weight_decay = 0.0;  ///< L2: added to the gradient, times the parameter
};

/// Stochastic gradient descent over local shards, one fused kernel call as AdamW's, with the same
/// treatment of narrow parameters. torch.optim.SGD without dampening. State "momentum_buffer",
/// if a group has momentum.
///
/// step(): as AdamW's.
class Sgd : public GroupedOptimizer<SgdOptions> {
 public:
  /// Throws Error for options that make no sense.
  explicit Sgd(std::vector<Group<SgdOptions>> groups);
  Sgd(std::vector<nn::SlotPtr> parameters, SgdOptions options);
  /// All slots below `module`.
  Sgd(const nn::ModuleBase& module, SgdOptions options);

 private:
  void update_shards(const std::vector<ShardUpdate>& shards, double factor) override;
};

}  // namespace tessera::optim
