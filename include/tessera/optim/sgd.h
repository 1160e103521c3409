#pragma once

#include <vector>

#include "tessera/export.h"
#include "tessera/optim/slot_optimizer.h"

TESSERA_API_BEGIN
namespace tessera::optim {

/// The defaults are those of torch.optim.SGD.
struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0.0;
  bool nesterov = false;      ///< needs momentum
  double weight_decay = 0.0;  ///< L2: added to the gradient, times the parameter
};

/// Stochastic gradient descent over local shards, with fused kernel calls and fp32 updates of
/// narrower parameters as in AdamW. torch.optim.SGD without dampening. State "momentum_buffer" if a
/// group has momentum.
///
/// step(): collective when AdamW's is, and throws what that throws.
class Sgd : public GroupedOptimizer<SgdOptions, BatchedOptimizer> {
 public:
  /// Throws Error for options that make no sense.
  explicit Sgd(std::vector<Group<SgdOptions>> groups);
  Sgd(std::vector<nn::SlotPtr> parameters, SgdOptions options);
  /// All slots below `module`.
  Sgd(const nn::ModuleBase& module, SgdOptions options);

 private:
  void update_batch(const Batch& batch, std::size_t group) override;
};

}  // namespace tessera::optim
TESSERA_API_END
