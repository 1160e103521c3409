#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::optim {

/// A tensor of an optimizer's state: of the parameter in `slot`, called "exp_avg" or the like. It
/// shares its memory with the optimizer and lies as the parameter does, except for counters, which
/// are plain and 0-d.
struct StateTensor {
  nn::SlotPtr slot;
  std::string name;
  at::Tensor tensor;
};

/// What a training loop needs of an optimizer. It holds slots, so it may be made before or after TP
/// and FSDP are applied.
class Optimizer {
 public:
  Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;
  virtual ~Optimizer() = default;

  /// One update from the slots' gradients, each multiplied by `gradient_factor` (what a GradScaler
  /// undoes its scale with) in the precision of the update: fp32 where parameters are narrower.
  /// Gradients are used up: what they hold afterwards is not specified.
  void step(double gradient_factor = 1.0) { update(gradient_factor); }
  /// Drops the gradients, with those that FSDP has accumulated and not reduced yet.
  void zero_grad();
  /// Each once, as clip_grad_norm_ takes them.
  virtual const std::vector<nn::SlotPtr>& parameters() const = 0;
  /// From now on each group's rate is its options' lr times `factor`: what LrSchedule gives.
  virtual void scale_lr(double factor) = 0;
  /// The state, made (as zeros) where there is none yet, for a checkpoint to read or to fill before
  /// the next step. Not collective. Throws Error for parameters that nobody has filled.
  virtual std::vector<StateTensor> state() = 0;

 private:
  virtual void update(double gradient_factor) = 0;
};

/// The state by FQN of the parameter and name: "model.norm.weight.exp_avg". Throws Error if the
/// optimizer has a parameter that is not in or below `module`.
std::vector<std::pair<std::string, at::Tensor>> named_state(Optimizer& optimizer,
                                                            const nn::ModuleBase& module);

/// All slots below `module`, in order.
std::vector<nn::SlotPtr> slots_of(const nn::ModuleBase& module);

}  // namespace tessera::optim
