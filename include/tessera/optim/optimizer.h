#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::optim {

/// A tensor of an optimizer's state for the parameter in `slot`, such as "exp_avg". It shares its
/// memory with the optimizer. It has the parameter's sizes and layout, except for counters, which
/// are plain and 0-d.
struct StateTensor {
  nn::SlotPtr slot;
  std::string name;
  at::Tensor tensor;
};

/// What a training loop needs of an optimizer. It holds slots and not tensors, so it may be made
/// before or after TP and FSDP are applied. Thread safety: one thread at a time. To write one, see
/// BatchedOptimizer in slot_optimizer.h.
class Optimizer {
 public:
  Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;
  virtual ~Optimizer() = default;

  /// Updates the parameters from their gradients. Each gradient is multiplied by `gradient_factor`,
  /// with which a GradScaler divides by its scale, in the type of the update: fp32 where parameters
  /// are narrower. The gradients' values are not specified afterwards: call zero_grad().
  /// The first step compares gradients that must be copies: on a mesh (dp, tp), those of a parameter
  /// on mesh["tp"] for each coordinate of dp. It is collective over the root meshes of distributed
  /// parameters, and throws Error if copies differ, because nothing sums them. With TESSERA_DEBUG=1
  /// every step compares.
  void step(double gradient_factor = 1.0) {
    check_copies();
    update(gradient_factor);
  }
  /// The same with a factor that is on a device, such as ClipFactor::factor: plain, 0-d, and the
  /// same on every rank. Each product is rounded to the type of the gradient, as clip_grad_norm_()
  /// rounds it. The host does not wait for it.
  void step(const at::Tensor& gradient_factor) {
    check_copies();
    update_scaled(gradient_factor);
  }
  /// Drops the gradients, and those that FSDP has accumulated but not reduced. Not collective.
  void zero_grad();
  /// Each once; for clip_grad_norm_.
  virtual const std::vector<nn::SlotPtr>& parameters() const = 0;
  /// Sets the rate of each group to its options' lr times `factor`, such as LrSchedule::factor().
  virtual void scale_lr(double factor) = 0;
  /// The state, for a checkpoint to read, or to fill before the next step. State that does not
  /// exist yet is made, as zeros, but for frozen parameters, which have none. Not collective.
  /// Throws Error for parameters that were never filled.
  virtual std::vector<StateTensor> state() = 0;

 private:
  virtual void update(double gradient_factor) = 0;
  /// Multiplies the gradients in place first.
  virtual void update_scaled(const at::Tensor& gradient_factor);
  void check_copies();

  bool compared_ = false;
};

/// The state, named by the parameter's FQN: "model.norm.weight.exp_avg". Not collective. Throws
/// Error if the optimizer has a parameter that `module` and the modules below it lack.
std::vector<std::pair<std::string, at::Tensor>> named_state(Optimizer& optimizer,
                                                            const nn::ModuleBase& module);

/// All slots below `module`, in order.
std::vector<nn::SlotPtr> slots_of(const nn::ModuleBase& module);

}  // namespace tessera::optim
TESSERA_API_END
