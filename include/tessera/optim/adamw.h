#pragma once

#include <ATen/core/Tensor.h>

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

/// AdamW (Loshchilov & Hutter 2019) over local shards: one fused kernel call for all parameters of
/// a type. Holds slots, so it may be made before or after TP and FSDP are applied; a slot given
/// twice (tied weights) counts once. State is made at a parameter's first step, shaped like its
/// local shard.
class AdamW {
 public:
  /// Throws Error for options that make no sense.
  AdamW(std::vector<nn::SlotPtr> parameters, AdamWOptions options);
  /// All slots below `module`.
  AdamW(const nn::ModuleBase& module, AdamWOptions options);

  /// One update from the slots' gradients; slots without one are skipped. No communication, but
  /// where a gradient lies otherwise than its parameter (a pending sum), which is redistributed:
  /// then collective. Throws Error, before any parameter changes, for a parameter without values or
  /// whose local shard changed its sizes since its first step.
  void step();
  /// Drops the gradients.
  void zero_grad();
  void set_lr(double lr) { options_.lr = lr; }
  double lr() const { return options_.lr; }
  /// Each once, as clip_grad_norm_ takes them.
  const std::vector<nn::SlotPtr>& parameters() const { return parameters_; }

 private:
  struct State {
    at::Tensor exp_avg, exp_avg_sq, step;
  };
  struct Batch;
  static Batch& batch_for(std::vector<Batch>& batches, const at::Tensor& local);
  const State& state_for(std::size_t index, const at::Tensor& local);
  void update(const Batch& batch) const;

  std::vector<nn::SlotPtr> parameters_;
  std::vector<State> state_;
  AdamWOptions options_;
};

}  // namespace tessera::optim
