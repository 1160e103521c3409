#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/parameter.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/optimizer.h"

TESSERA_API_BEGIN
namespace tessera::optim {

/// The defaults are those of torch.amp.GradScaler.
struct GradScalerOptions {
  /// False: scale() returns the loss unchanged, step() always steps, and nothing is checked.
  bool enabled = true;
  double init_scale = 65536.0;
  double growth_factor = 2.0;           ///< multiplies the scale after growth_interval good steps
  double backoff_factor = 0.5;          ///< multiplies the scale after a step that overflowed
  std::int64_t growth_interval = 2000;  ///< in consecutive steps without an overflow
  /// The scale must not fall below this: step() throws Error instead.
  double min_scale = 1e-4;
  /// After an overflow the scale falls only if at least this fraction of the steps since it last
  /// changed have overflowed. 0: after each overflow.
  double tolerance = 0.0;

  /// fairseq's and ParlAI's choice for fp16 parameters: 2^17, tolerance 0.05.
  static GradScalerOptions memory_efficient() {
    return {.init_scale = 131072.0, .tolerance = 0.05};
  }
};

/// Dynamic loss scaling for fp16 (Micikevicius et al. 2018). The loss is multiplied by a scale, so
/// that small gradients do not vanish, and the gradients are divided by it again. A step whose
/// gradients overflowed is skipped, on all ranks together. Thread safety: one thread at a time.
///
///   optim::GradScaler scaler;                      // {.enabled = dtype == kHalf}
///   for (...) {
///     scaler.scale(loss).backward();               // one micro-batch or several
///     at::Tensor norm = scaler.clip_grad_norm_(parameters, 1.0);  // the true norm; one all-reduce
///     if (!scaler.step(optimizer)) { /* skipped: the norm is not finite, the scale falls */ }
///     optimizer.zero_grad();
///   }
///
/// Two ways to use fp16:
/// * safe: fp32 parameters, cast for each forward: fsdp::MixedPrecisionPolicy{.param_dtype = kHalf,
///   .reduce_dtype = kFloat}. Gradients arrive in fp32.
/// * memory-efficient: fp16 parameters and gradients, GradScalerOptions::memory_efficient(). The
///   optimizer divides and updates in fp32, a few parameters at a time, so that no small gradient
///   is lost (fairseq's MemoryEfficientFP16Optimizer).
///
/// step() divides the gradients; until then .grad holds scaled ones, unless unscale_ was called. An
/// overflow is recognised by the norm of the gradients on all ranks of all meshes, so that one
/// all-reduce serves clipping and scaling. The host waits for the device only to read that norm.
/// Join several optimizers in an OptimizerList. The scale belongs in a checkpoint: state().
class GradScaler {
 public:
  /// Throws Error for options that make no sense.
  explicit GradScaler(GradScalerOptions options = {});

  bool enabled() const { return options_.enabled; }
  double scale() const { return enabled() ? state_.scale : 1.0; }
  /// loss * scale().
  at::Tensor scale(const at::Tensor& loss) const;

  /// Makes step() clip the divided gradients to a norm of `max_norm`. Returns their norm before
  /// clipping, like optim::clip_grad_norm_; infinite or NaN if some overflowed. Collective like
  /// that. At most once a step, and of all parameters that step() is to update.
  at::Tensor clip_grad_norm_(const std::vector<nn::SlotPtr>& parameters, double max_norm,
                             const NormOptions& options = {});
  /// Instead: divides the gradients now, in place, for code that reads or changes them before
  /// step(). Throws Error for gradients narrower than fp32, where small ones would vanish.
  /// Collective like grad_norm(). At most once a step, and of all parameters that step() is to
  /// update. optim::clip_grad_norm_ may then clip some of them.
  void unscale_(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options = {});

  /// Calls optimizer.step() unless a gradient overflowed, and sets the next scale. Returns whether
  /// it stepped, the same on every rank. If neither clip_grad_norm_ nor unscale_ was called before,
  /// it calls grad_norm() with `options` and is collective like that. Pipeline stages, whose ranks
  /// must skip the same steps, need NormOptions::over in whichever of these calls comes first.
  /// Throws Error, on every rank, if the scale would fall below min_scale; the scale then stays.
  /// Throws Error for a parameter with a gradient that was not among those clipped or unscaled.
  bool step(Optimizer& optimizer, const NormOptions& options = {});
  /// What clip_and_step() did.
  struct ClippedStep {
    at::Tensor norm;  ///< as clip_grad_norm_ returns it
    bool stepped;     ///< as step returns it
  };
  /// clip_grad_norm_ and step in one. Where it is not enabled, it saves a pass over the gradients:
  /// the optimizer multiplies them as it reads them (optim::clip_factor). Their values are not
  /// specified afterwards. Throws Error, before anything is changed, for a parameter with a
  /// gradient that the optimizer updates and that is not among `parameters`.
  ClippedStep clip_and_step(Optimizer& optimizer, const std::vector<nn::SlotPtr>& parameters,
                            double max_norm, const NormOptions& options = {});
  /// The same. `before_step` is given the norm before the optimizer steps, and is not called where
  /// it does not: if it throws, the parameters are as they were.
  ClippedStep clip_and_step(Optimizer& optimizer, const std::vector<nn::SlotPtr>& parameters,
                            double max_norm, const NormOptions& options,
                            const std::function<void(const at::Tensor& norm)>& before_step);

  /// For checkpoints. Counts are of steps.
  struct State {
    double scale = 0.0;
    std::int64_t steps_since_overflow = 0;
    std::int64_t steps_since_change = 0;
    std::int64_t overflows_since_change = 0;
    friend bool operator==(const State&, const State&) = default;
  };
  const State& state() const { return state_; }
  /// Throws Error for a scale that is not above 0.
  void load_state(const State& state);

 private:
  /// What clip_grad_norm_ or unscale_ found out for step().
  struct Checked {
    bool finite = true;
    double factor = 1.0;  ///< by which step() multiplies the gradients
    std::vector<nn::SlotPtr> parameters = {};
  };
  void check_once() const;
  void adjust(bool finite);
  void back_off();

  GradScalerOptions options_;
  State state_;
  std::optional<Checked> checked_;
};

}  // namespace tessera::optim
TESSERA_API_END
