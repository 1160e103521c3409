#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::optim {

/// A state tensor of an optimizer, such as "exp_avg", for the parameter in `slot`. Has the
/// parameter's sizes and layout; a counter is plain and 0-d. Shares memory with the optimizer.
struct StateTensor {
  nn::SlotPtr slot;
  std::string name;
  at::Tensor tensor;
};

struct GradientFactor;

/// The interface of optimizers. An optimizer refers to parameter slots (nn::ParameterSlot), and can
/// be made before or after tensor parallelism and FSDP are applied. To write an optimizer, see
/// GroupedOptimizer. Thread safety: one thread at a time.
class Optimizer : tessera::detail::NoCopy {
 public:
  virtual ~Optimizer() = default;

  /// Updates the parameters from their gradients. Gradients are multiplied by `gradient_factor` in
  /// the dtype of the update, at least fp32. Gradient values are unspecified afterwards: call
  /// zero_grad().
  ///
  /// The first step (with TESSERA_DEBUG=1, every step) throws Error if ranks with copies of a
  /// parameter have different gradients. The check is collective over the root meshes of
  /// distributed parameters.
  void step(double gradient_factor = 1.0);
  /// Like step() with a number, but the factor is a plain 0-d device tensor, equal on every rank,
  /// such as ClipFactor::factor. The CPU does not wait. Scaled gradients are rounded to their
  /// dtype. If the factor is NaN or infinite, parameters on a CPU and their state are unchanged. On
  /// a GPU, only fp32 parameters of AdamW are unchanged. An Ema still updates its averages.
  void step(const at::Tensor& gradient_factor);
  /// Clears the gradients, including the gradients that FSDP has accumulated but not reduced. Not
  /// collective.
  void zero_grad();
  /// Returns all parameters of the optimizer, each once, for example for clip_grad_norm_.
  virtual const std::vector<nn::SlotPtr>& parameters() const = 0;
  /// Sets the learning rate of each group to `factor` times the lr in the group's options; for
  /// example with LrSchedule::factor().
  virtual void scale_lr(double factor) = 0;
  /// Returns the optimizer state, to save or to load into. Missing state is created as zeros.
  /// Frozen parameters have no state. Not collective. Throws Error for uninitialized parameters.
  virtual std::vector<StateTensor> state() = 0;

 private:
  virtual void update(const GradientFactor& factor) = 0;
  void check_copies();

  bool compared_ = false;
};

/// Returns the state tensors of an optimizer, with FQNs: "model.norm.weight.exp_avg". Not
/// collective. Throws Error if the optimizer has a parameter that is not in `module` or below.
std::vector<std::pair<std::string, at::Tensor>> named_state(Optimizer& optimizer,
                                                            const nn::ModuleBase& module);

/// Returns the parameter slots (nn::ParameterSlot) of `module` and of all its submodules.
std::vector<nn::SlotPtr> slots_of(const nn::ModuleBase& module);

/// Combines several optimizers with different parameters. step() calls the optimizers in order.
///   const optim::MuonSplit split = optim::split_for_muon(model, {"lm_head.weight"});
///   optim::OptimizerList optimizer(
///       {std::make_shared<optim::Muon>(split.matrices, optim::MuonOptions{.lr = 0.02}),
///        std::make_shared<optim::AdamW>(split.rest, optim::AdamWOptions{.lr = 3e-4})});
class OptimizerList : public Optimizer {
 public:
  /// The constructor throws Error for a parameter that two optimizers update, and for a null
  /// optimizer.
  explicit OptimizerList(std::vector<std::shared_ptr<Optimizer>> optimizers);

  const std::vector<nn::SlotPtr>& parameters() const override { return parameters_; }
  void scale_lr(double factor) override;
  std::vector<StateTensor> state() override;

 private:
  void update(const GradientFactor& factor) override;

  std::vector<std::shared_ptr<Optimizer>> optimizers_;
  std::vector<nn::SlotPtr> parameters_;
};

/// An optimizer with an exponential moving average of the trainable parameters (Polyak & Juditsky
/// 1992). After each step of `inner`, average = decay * average + (1 - decay) * parameter. The
/// first average is the parameters before the first step. Averages are local, at least fp32, and
/// saved as optimizer state "ema". Ema does not communicate.
class Ema final : public Optimizer {
 public:
  /// The constructor throws Error unless 0 <= decay < 1, and for a null optimizer.
  Ema(std::shared_ptr<Optimizer> inner, double decay);

  const std::vector<nn::SlotPtr>& parameters() const override { return inner_->parameters(); }
  void scale_lr(double factor) override { inner_->scale_lr(factor); }
  std::vector<StateTensor> state() override;

  /// Exchanges the parameters with their averages, for evaluation or export; a second call restores
  /// the parameters. Until then, step() and state() throw Error. Must not be called between a
  /// forward and its backward. Not collective. Throws Error, before any change, for parameters
  /// narrower than fp32.
  void swap();

 private:
  void update(const GradientFactor& factor) override;
  void average();
  void make_averages();
  void begin_averages();
  void check_not_swapped() const;
  void check_sizes(std::size_t index) const;

  std::shared_ptr<Optimizer> inner_;
  double decay_;
  /// The moving average of each of parameters(); undefined for frozen parameters.
  std::vector<at::Tensor> averages_;
  bool swapped_ = false;
};

/// How the learning rate changes after the warm-up.
enum class Schedule : std::uint8_t { kConstant, kLinear, kCosine, kWsd };

/// Returns the schedule for the name "constant", "linear", "cosine" or "wsd". Throws Error for any
/// other name.
Schedule parse_schedule(std::string_view name);

/// Options of LrSchedule.
struct LrScheduleOptions {
  Schedule schedule = Schedule::kConstant;
  std::int64_t warmup = 0;  ///< number of steps of the warm-up
  std::int64_t steps = 0;  ///< number of steps of the run; required unless the schedule is constant
  /// The length of the decay of a kWsd schedule, as a fraction of `steps`.
  double decay_ratio = 0.2;
  double min_factor = 0;  ///< final learning rate, as a fraction of the full rate
};

/// Computes the learning rate's factor at each step, for Optimizer::scale_lr, by torchtitan's
/// formulas. At step s (from 0) of N, with W steps of warm-up:
///   s < W:   (s + 1) / W
///   s >= W:  min_factor + (1 - min_factor) f, where f for p = (s - W) / (N - W) is
///     constant: 1        linear: 1 - p        cosine: (1 + cos(pi p)) / 2
///     wsd (warm-up, stable, decay; Hu et al. 2024): 1, but (N - s) / D in the last D steps
/// For wsd, D = round(decay_ratio N), at most N - W (with a warning). The last step's rate is not
/// 0. Hugging Face's schedules differ only in the warm-up, s / W.
class LrSchedule {
 public:
  /// Throws Error for negative steps and for fractions outside [0, 1]. A warm-up of `steps` or more
  /// is allowed: the run then ends within the warm-up.
  explicit LrSchedule(const LrScheduleOptions& options);
  /// Returns the factor at a step. After a finished warm-up, the factor from step N on is
  /// min_factor, or 1 for a constant schedule. Throws Error for a step below 0. Throws Error
  /// without LrScheduleOptions::steps, except for a constant schedule.
  double factor(std::int64_t step) const;

 private:
  double falling(std::int64_t step) const;

  LrScheduleOptions options_;
};

}  // namespace tessera::optim
TESSERA_API_END
