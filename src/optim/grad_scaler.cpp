// Loss scaling. step() divides the gradients in its kernels. The norm for clipping is infinite or
// NaN if a gradient overflowed, so the overflow check needs no other all-reduce.

#include "tessera/optim/grad_scaler.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_set>
#include <utility>

#include "local_shards.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/core/error.h"
#include "tessera/nn/detail/slots.h"

namespace tessera::optim {
namespace {

/// Throws Error if the optimizer updates a parameter that has a gradient but is not in
/// `parameters`: the gradient was neither checked for overflow nor clipped.
void check_covers(const std::vector<nn::SlotPtr>& parameters, const Optimizer& optimizer) {
  if (parameters == optimizer.parameters()) {
    return;  // the same parameters in the same order
  }
  const std::unordered_set<nn::SlotPtr> known(parameters.begin(), parameters.end());
  for (const nn::SlotPtr& slot : optimizer.parameters()) {
    TESSERA_CHECK(
        known.contains(slot) || !slot->persistent().grad().defined(), "the optimizer updates ",
        nn::describe(*slot),
        ", but the GradScaler did not clip or unscale that parameter; pass all parameters of the "
        "optimizer (to clip only some: unscale_(all), then optim::clip_grad_norm_(some))");
  }
}

}  // namespace

/// Comparisons with NaN are false, so the checks also reject NaN.
GradScaler::GradScaler(GradScalerOptions options) : options_(options) {
  TESSERA_CHECK(options.init_scale > 0.0 && std::isfinite(options.init_scale) &&
                    options.growth_factor >= 1.0 && options.backoff_factor > 0.0 &&
                    options.backoff_factor < 1.0 && options.growth_interval > 0,
                "a GradScaler with initial scale ", options.init_scale, ", growth ",
                options.growth_factor, " every ", options.growth_interval, " steps, backoff ",
                options.backoff_factor, " is invalid; the scale and the interval must be above 0, ",
                "growth at least 1, backoff in (0, 1)");
  state_.scale = options.init_scale;
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  return enabled() ? loss * state_.scale : loss;
}

/// Throws Error if the gradients of one step would be unscaled twice and become too small.
void GradScaler::check_once() const {
  TESSERA_CHECK(!checked_, "GradScaler: clip_grad_norm_ or unscale_ was already called for this ",
                "step; call one of the two functions once, then step");
}

/// clip_grad_norm_() does not change the gradients: step() later multiplies by one factor that
/// unscales and clips. The constant 1e-6 is from torch.nn.utils.
at::Tensor GradScaler::clip_grad_norm_(const std::vector<nn::SlotPtr>& parameters, double max_norm,
                                       const NormOptions& options) {
  RECORD_USER_SCOPE("clip_grad_norm_");
  if (!enabled()) {
    return optim::clip_grad_norm_(parameters, max_norm, options);
  }
  check_once();
  const comm::CallerScope caller("clip_grad_norm_");
  check_max_norm(max_norm);
  const at::Tensor scaled = grad_norm(parameters, options);
  const double norm = scaled.item<double>() / state_.scale;
  if (std::isfinite(norm)) {
    check_gradient_copies(parameters, "clip_grad_norm_", options);
  }
  checked_ = {std::isfinite(norm), std::min(1.0, max_norm / (norm + 1e-6)) / state_.scale,
              parameters};
  return scaled / state_.scale;
}

void GradScaler::unscale_(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options) {
  if (!enabled()) {
    return;
  }
  check_once();
  const comm::CallerScope caller("unscale_");
  const c10::AutoGradMode no_grad(false);
  const GradTerms terms = collect_grads(parameters, options);
  for (const at::Tensor& grad : terms.locals) {
    TESSERA_CHECK(grad.element_size() >= 4, "GradScaler::unscale_ of ", grad.scalar_type(),
                  " gradients would lose small values; call only clip_grad_norm_ and step, which "
                  "divide in fp32");
  }
  // If any gradient is infinite or NaN, so is the largest absolute value of all gradients.
  const at::Tensor largest = total_norm(terms, std::numeric_limits<double>::infinity()).norm;
  checked_ = {std::isfinite(largest.item<double>()), 1.0, parameters};
  // Non-finite gradients remain scaled, because the step will be skipped.
  if (checked_->finite) {
    check_gradient_copies(parameters, "GradScaler::unscale_", options);
    scale_by(terms.locals, at::scalar_tensor(1.0 / state_.scale, largest.options()));
  }
}

bool GradScaler::step(Optimizer& optimizer, const NormOptions& options) {
  RECORD_USER_SCOPE("optimizer step");
  const comm::CallerScope caller("optimizer step");
  if (!enabled()) {
    optimizer.step();
    return true;
  }
  if (!checked_) {
    NormOptions largest = options;
    largest.norm_type = std::numeric_limits<double>::infinity();
    largest.error_if_nonfinite = false;
    const auto norm = grad_norm(optimizer.parameters(), largest).item<double>();
    if (std::isfinite(norm)) {
      check_gradient_copies(optimizer.parameters(), "GradScaler::step", options);
    }
    checked_ = {std::isfinite(norm), 1.0 / state_.scale, optimizer.parameters()};
  }
  // checked_, the result of the overflow check, is cleared before the step. If the step throws, the
  // next step must not use this result.
  const Checked checked = *std::exchange(checked_, std::nullopt);
  check_covers(checked.parameters, optimizer);
  if (checked.finite) {
    optimizer.step(checked.factor);
  }
  adjust(checked.finite);
  return checked.finite;
}

std::pair<at::Tensor, bool> GradScaler::clip_and_step(
    Optimizer& optimizer, const std::vector<nn::SlotPtr>& parameters, double max_norm,
    const std::function<void(const at::Tensor& norm)>& before_step) {
  if (enabled()) {
    const at::Tensor norm = clip_grad_norm_(parameters, max_norm);
    // before_step() can throw, so checked_ is empty while before_step() runs.
    const std::optional<Checked> checked = std::exchange(checked_, std::nullopt);
    if (checked->finite && before_step) {
      before_step(norm);
    }
    checked_ = checked;
    return {norm, step(optimizer)};
  }
  check_covers(parameters, optimizer);
  ClipFactor clip;
  {
    RECORD_USER_SCOPE("clip_grad_norm_");
    clip = clip_factor(parameters, max_norm);
  }
  if (before_step) {
    before_step(clip.norm);
  }
  RECORD_USER_SCOPE("optimizer step");
  optimizer.step(clip.factor);
  const bool known = clip.factor.defined() && clip.factor.is_cpu();
  return {clip.norm, !known || std::isfinite(clip.factor.item<double>())};
}

/// Sets the next loss scale. `finite` comes from the all-reduced norm and is the same on all ranks,
/// so the scales remain equal without further communication.
void GradScaler::adjust(bool finite) {
  if (finite) {
    const double grown = state_.scale * options_.growth_factor;
    // A loss scale above the largest fp32 number would make the scaled loss infinite.
    if (++state_.steps_since_overflow % options_.growth_interval == 0 &&
        grown <= static_cast<double>(std::numeric_limits<float>::max())) {
      state_.scale = grown;
    }
    return;
  }
  constexpr double kLeast = 1e-4;
  state_.steps_since_overflow = 0;
  const double next = state_.scale * options_.backoff_factor;
  TESSERA_CHECK(next >= kLeast, "the gradients overflowed at a loss scale of ", state_.scale,
                ", and the next scale, ", next, ", is below the minimum, ", kLeast,
                ": the loss is probably exploding; lower the learning rate, clip gradients, ",
                "enlarge the batch or train in bf16");
  state_.scale = next;
}

void GradScaler::load_state(const State& state) {
  TESSERA_CHECK(state.scale > 0.0 && std::isfinite(state.scale),
                "GradScaler::load_state: the scale is ", state.scale,
                ", but must be above 0 and finite");
  state_ = state;
  // The gradients in checked_ were computed with the old scale, so checked_ is dropped.
  checked_.reset();
}

}  // namespace tessera::optim
