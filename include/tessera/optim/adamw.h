#pragma once

#include <vector>

#include "tessera/optim/slot_optimizer.h"

namespace tessera::optim {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
};

/// AdamW (Loshchilov & Hutter 2019) over local shards: one fused kernel call for all parameters of
/// a group, a type and a device, in which shards that are neighbours in memory are one. State
/// "exp_avg", "exp_avg_sq", "step".
///
/// Parameters narrower than fp32 have state in fp32 and are updated in it, then rounded:
/// fairseq's memory-efficient fp16, where there is no fp32 copy of them.
///
/// step(): no communication, but where a gradient lies otherwise than its parameter (a pending
/// sum), which is redistributed: then collective. Slots without a gradient are skipped. Throws
/// Error, before any parameter changes, for a parameter without values or whose local shard changed
/// its sizes or device since its first step.
class AdamW : public GroupedOptimizer<AdamWOptions> {
 public:
  /// Throws Error for options that make no sense.
  explicit AdamW(std::vector<Group<AdamWOptions>> groups);
  AdamW(std::vector<nn::SlotPtr> parameters, AdamWOptions options);
  /// All slots below `module`.
  AdamW(const nn::ModuleBase& module, AdamWOptions options);

 private:
  void update_shards(const std::vector<ShardUpdate>& shards, double factor) override;
};

}  // namespace tessera::optim
