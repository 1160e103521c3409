#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/parameter.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/optimizer.h"

TESSERA_API_BEGIN
namespace tessera::optim {

/// Options of GradScaler. The defaults are those of torch.amp.GradScaler.
struct GradScalerOptions {
  /// Whether the scaler is used. If false, scale() returns the loss unchanged, step() always steps,
  /// and nothing is checked.
  bool enabled = true;
  double init_scale = 65536.0;
  double growth_factor = 2.0;           ///< factor on the scale after growth_interval steps
  double backoff_factor = 0.5;          ///< factor on the scale after an overflow
  std::int64_t growth_interval = 2000;  ///< number of steps without overflow before the scale grows
};

/// Dynamic loss scaling for fp16 (Micikevicius et al. 2018). The loss is multiplied by a scale, so
/// that small gradients do not vanish. The gradients are divided by this scale before the update. A
/// step with overflowed gradients is skipped, on all ranks together. Thread safety: one thread at a
/// time.
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
/// * safe: fp32 parameters that are cast for each forward, with
///   fsdp::MixedPrecisionPolicy{.param_dtype = kHalf, .reduce_dtype = kFloat}. Gradients are fp32.
/// * memory-efficient: fp16 parameters and gradients. The optimizer converts small groups of
///   parameters to fp32, and divides and updates in fp32, so that no small gradient is lost
///   (fairseq's MemoryEfficientFP16Optimizer).
///
/// Before step(), .grad contains scaled gradients, unless unscale_ was called; step() divides the
/// gradients by the scale. An overflow shows in the norm of all gradients on all ranks, which
/// clipping needs anyway, so there is only one all-reduce. The CPU waits for the device only to
/// read this norm. Combine several optimizers in an OptimizerList. Save the scale in checkpoints:
/// state().
class GradScaler {
 public:
  /// The constructor throws Error for invalid options.
  explicit GradScaler(GradScalerOptions options = {});

  bool enabled() const { return options_.enabled; }
  double scale() const { return enabled() ? state_.scale : 1.0; }
  /// Returns loss * scale().
  at::Tensor scale(const at::Tensor& loss) const;

  /// Makes step() clip the unscaled gradients to a norm of `max_norm`. Returns the norm before
  /// clipping, like optim::clip_grad_norm_; the norm is infinite or NaN if a gradient overflowed.
  /// Collective like optim::clip_grad_norm_. To be called at most once per step, with all
  /// parameters that step() will update.
  at::Tensor clip_grad_norm_(const std::vector<nn::SlotPtr>& parameters, double max_norm,
                             const NormOptions& options = {});
  /// Alternative to clip_grad_norm_(): divides the gradients by the scale immediately, in place,
  /// for code that reads or changes gradients before step(). Throws Error for gradients narrower
  /// than fp32, in which small values would vanish. Collective like grad_norm(). Call unscale_() at
  /// most once per step, with all parameters that step() will update. After unscale_(),
  /// optim::clip_grad_norm_ can clip some of these parameters.
  void unscale_(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options = {});

  /// Calls optimizer.step() unless a gradient overflowed, and computes the scale for the next step.
  /// Returns whether the optimizer stepped: the same result on every rank. If neither
  /// clip_grad_norm_ nor unscale_ was called before, step() calls grad_norm() with `options`, and
  /// is then collective like grad_norm(). Pipeline stages must skip the same steps: pass
  /// NormOptions::over to unscale_ or clip_grad_norm_ or, if neither is called, to step(). Throws
  /// Error, on every rank, if the scale would fall below 1e-4; the scale is then unchanged. Throws
  /// Error if a parameter with a gradient was not clipped or unscaled before.
  bool step(Optimizer& optimizer, const NormOptions& options = {});
  /// Clips the gradients and calls optimizer.step(). If the scaler is not enabled, the optimizer
  /// multiplies each gradient by the clip factor while it reads the gradient (optim::clip_factor),
  /// which saves a pass over the gradients. The gradients' values are unspecified afterwards.
  /// Returns the norm before clipping, and whether the optimizer updated the parameters. On a GPU
  /// without scaling, a skipped update also returns true: the CPU does not wait for the norm.
  /// Throws Error, before anything is changed, if the optimizer updates a parameter with a gradient
  /// that is not among `parameters`. `before_step` is called with the norm before the optimizer
  /// steps, but not if the step is skipped. If `before_step` throws, the parameters are unchanged.
  std::pair<at::Tensor, bool> clip_and_step(
      Optimizer& optimizer, const std::vector<nn::SlotPtr>& parameters, double max_norm,
      const std::function<void(const at::Tensor& norm)>& before_step = {});

  /// The scale, and the number of steps since the last overflow, for checkpoints.
  struct State {
    double scale = 0.0;
    std::int64_t steps_since_overflow = 0;
    friend bool operator==(const State&, const State&) = default;
  };
  const State& state() const { return state_; }
  /// Restores a state that state() returned. Throws Error for a scale that is not above 0.
  void load_state(const State& state);

 private:
  struct Checked {
    bool finite = true;
    double factor = 1.0;
    std::vector<nn::SlotPtr> parameters = {};
  };
  void check_once() const;
  void adjust(bool finite);

  GradScalerOptions options_;
  State state_;
  std::optional<Checked> checked_;
};

}  // namespace tessera::optim
TESSERA_API_END
