#pragma once

#include <vector>

#include "tessera/export.h"
#include "tessera/optim/slot_optimizer.h"

TESSERA_API_BEGIN
namespace tessera::optim {

/// The defaults are those of torch.optim.AdamW.
struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;          ///< decay of the running mean of gradients
  double beta2 = 0.999;        ///< decay of the running mean of their squares
  double eps = 1e-8;           ///< added to the root of the latter
  double weight_decay = 1e-2;  ///< decoupled: parameters are multiplied by 1 - lr * weight_decay
};

/// AdamW (Loshchilov & Hutter 2019) over local shards: one fused kernel call for all parameters of
/// a group, a type and a device; shards that adjoin in memory are updated as one tensor. State
/// "exp_avg", "exp_avg_sq", "step".
///
/// Parameters narrower than fp32 have fp32 state. They are updated in fp32 and rounded; there is no
/// fp32 copy of them between steps (fairseq's memory-efficient fp16).
///
/// step(): not collective, unless the layout of a gradient differs from its parameter's (a pending
/// sum), which is then redistributed. Parameters without a gradient are skipped. Throws Error,
/// before any parameter changes, for a parameter that is not filled, and for one whose local shard
/// has changed its sizes or device since its first step. Thread safety: one thread at a time.
class AdamW : public GroupedOptimizer<AdamWOptions, BatchedOptimizer> {
 public:
  /// Throws Error for options that make no sense.
  explicit AdamW(std::vector<Group<AdamWOptions>> groups);
  AdamW(std::vector<nn::SlotPtr> parameters, AdamWOptions options);
  /// All slots below `module`.
  AdamW(const nn::ModuleBase& module, AdamWOptions options);

 private:
  void update_batch(const Batch& batch, std::size_t group) override;
};

}  // namespace tessera::optim
TESSERA_API_END
