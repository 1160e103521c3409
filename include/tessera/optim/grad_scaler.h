#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/nn/parameter.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/optimizer.h"

namespace tessera::optim {

struct GradScalerOptions {
  /// False: scale() returns the loss as it is, step() always steps, nothing is checked.
  bool enabled = true;
  double init_scale = 65536.0;
  double growth_factor = 2.0;   ///< of the scale after growth_interval steps without overflow
  double backoff_factor = 0.5;  ///< of the scale after an overflow
  std::int64_t growth_interval = 2000;
  /// The scale must not fall below this: step() throws Error instead.
  double min_scale = 1e-4;
  /// The scale falls only if at least this share of the steps since it last fell or grew have
  /// overflown; 0: after each overflow.
  double tolerance = 0.0;

  /// fairseq's and ParlAI's choice for fp16 parameters: 2^17, tolerance 0.05.
  static GradScalerOptions memory_efficient() {
    return {.init_scale = 131072.0, .tolerance = 0.05};
  }
};

/// Dynamic loss scaling for fp16: the loss is multiplied by a scale, so that small gradients do not
/// vanish, the gradients are divided by it again, and a step whose gradients overflowed is left
/// out, on every rank together.
///
///   optim::GradScaler scaler;                      // {.enabled = dtype == kHalf}
///   for (...) {
///     scaler.scale(loss).backward();               // one micro-batch or several
///     at::Tensor norm = scaler.clip_grad_norm_(parameters, 1.0);  // the true norm; one all-reduce
///     if (!scaler.step(optimizer)) { /* left out: the norm is not finite, the scale fell */ }
///     optimizer.zero_grad();
///   }
///
/// Two ways to use fp16:
/// * safe: fp32 parameters, cast for each forward: fsdp::MixedPrecisionPolicy{.param_dtype = kHalf,
///   .reduce_dtype = kFloat}. Gradients arrive in fp32.
/// * memory-efficient: fp16 parameters and gradients, GradScalerOptions::memory_efficient(). The
///   division, like the whole update, happens in fp32 in the optimizer, a few parameters at a
///   time, so that no small gradient is lost (fairseq's MemoryEfficientFP16Optimizer).
///
/// Gradients are divided in step(): until then .grad holds them scaled (unless unscale_ is called).
/// Whether they overflowed is read from their norm, which is that of all ranks of all meshes
/// together, so one all-reduce serves both; it is the only synchronisation with the device. Several
/// optimizers: join them in an OptimizerList. The scale is part of a checkpoint: state().
class GradScaler {
 public:
  /// Throws Error for options that make no sense.
  explicit GradScaler(GradScalerOptions options = {});

  bool enabled() const { return options_.enabled; }
  double scale() const { return enabled() ? state_.scale : 1.0; }
  /// loss * scale().
  at::Tensor scale(const at::Tensor& loss) const;

  /// Lets step() clip the divided gradients to a norm of `max_norm`. Returns their norm before
  /// clipping, as optim::clip_grad_norm_ does, infinite or NaN if some overflowed. Collective as
  /// that is. Once a step.
  at::Tensor clip_grad_norm_(const std::vector<nn::SlotPtr>& parameters, double max_norm,
                             const NormOptions& options = {});
  /// Instead: divides the gradients now, in place, for whoever wants to read or change them before
  /// step(). Throws Error for gradients narrower than fp32, of which small ones would vanish.
  /// Collective like grad_norm(). Once a step.
  void unscale_(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options = {});

  /// optimizer.step(), unless a gradient overflowed, and the next scale. Returns whether it
  /// stepped: the same on every rank. Collective like grad_norm() if neither clip_grad_norm_ nor
  /// unscale_ was called before: `options` are for that, and `over` is needed, there or here, where
  /// no rank knows all meshes (pipeline stages, whose ranks must leave out the same steps). Throws
  /// Error, on every rank, when the scale would fall below min_scale; it then stays as it is.
  bool step(Optimizer& optimizer, const NormOptions& options = {});

  /// What a checkpoint keeps.
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
  /// What is known of the gradients before step().
  struct Checked {
    bool finite = true;
    double factor = 1.0;  ///< to be multiplied in step()
  };
  void check_once() const;
  void adjust(bool finite);
  void back_off();

  GradScalerOptions options_;
  State state_;
  std::optional<Checked> checked_;
};

}  // namespace tessera::optim
