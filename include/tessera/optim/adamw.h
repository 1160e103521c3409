#pragma once

#include <cstdint>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::optim {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
};

/// AdamW (Loshchilov & Hutter) over local shards: one fused kernel call for all parameters, no
/// communication. Holds slots, so it may be made before or after TP and FSDP are applied. State is
/// made at the first step, shaped like the local shards.
class AdamW {
 public:
  AdamW(std::vector<nn::SlotPtr> parameters, AdamWOptions options);
  /// All slots below `module`.
  AdamW(const nn::ModuleBase& module, AdamWOptions options);

  /// One update from the slots' gradients; slots without one are skipped.
  void step();
  /// Drops the gradients.
  void zero_grad();
  void set_lr(double lr) { options_.lr = lr; }
  double lr() const { return options_.lr; }

 private:
  struct State {
    at::Tensor exp_avg, exp_avg_sq, step;
  };
  std::vector<nn::SlotPtr> parameters_;
  std::vector<State> state_;
  AdamWOptions options_;
};

}  // namespace tessera::optim
