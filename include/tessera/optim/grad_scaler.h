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
/// that small gradients do not vanish. If a gradient overflows, all ranks skip the step. Thread
/// safety: one thread at a time.
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
/// * safe: fp32 parameters with fsdp::MixedPrecisionPolicy{.param_dtype = kHalf, .reduce_dtype =
///   kFloat}. Gradients are fp32.
/// * memory-efficient: fp16 parameters and gradients. The optimizer divides and updates in fp32
///   (fairseq's MemoryEfficientFP16Optimizer).
///
/// Before step(), gradients are scaled, unless unscale_ was called. Combine several optimizers in
/// an OptimizerList. Save state() in checkpoints.
class GradScaler {
 public:
  /// The constructor throws Error for invalid options.
  explicit GradScaler(GradScalerOptions options = {});

  bool enabled() const { return options_.enabled; }
  double scale() const { return enabled() ? state_.scale : 1.0; }
  /// Returns loss * scale().
  at::Tensor scale(const at::Tensor& loss) const;

  /// Makes step() clip the unscaled gradients to `max_norm`. Returns the norm before clipping;
  /// after an overflow, infinity or NaN. Collective like optim::clip_grad_norm_. Call at most once
  /// per step, with all parameters of step().
  at::Tensor clip_grad_norm_(const std::vector<nn::SlotPtr>& parameters, double max_norm,
                             const NormOptions& options = {});
  /// Divides the gradients by the scale now, in place, for code that uses gradients before step().
  /// Call at most once per step, with all parameters of step(), instead of clip_grad_norm_().
  /// Collective like grad_norm(). Throws Error for gradients narrower than fp32.
  void unscale_(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options = {});

  /// Calls optimizer.step() unless a gradient overflowed, and updates the scale. Returns whether
  /// the optimizer stepped, equal on every rank. Without an earlier clip_grad_norm_ or unscale_,
  /// computes grad_norm() with `options`, and is collective like grad_norm(). Pipeline stages must
  /// set NormOptions::over. Throws Error, on every rank, if the scale would fall below 1e-4. Throws
  /// Error for a gradient that the earlier call did not get.
  bool step(Optimizer& optimizer, const NormOptions& options = {});
  /// Clips the gradients and calls optimizer.step(). Returns the norm before clipping, and whether
  /// the optimizer stepped (on a GPU without scaling: always true). Gradient values are unspecified
  /// afterwards. `before_step` is called with the norm before an update that is not skipped; if
  /// `before_step` throws, parameters are unchanged. Throws Error, before any change, if the
  /// optimizer updates a parameter with a gradient that `parameters` does not contain.
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
