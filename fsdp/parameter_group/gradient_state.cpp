// Gradients between backward and the optimizer. With gradient sync a unit's are reduced at once;
// without, they are set aside unsharded and go into the next reduction, which costs the memory of
// unsharded gradients and saves a collective a micro-batch.

#include "parameter_group/gradient_state.h"

#include <ATen/ops/isfinite.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "tessera/core/detail/environment.h"

namespace tessera::fsdp {
namespace {

/// A unit keeps its smallest gradient if it has no more elements: a norm's weight or a bias has
/// fewer.
constexpr std::int64_t kSampleNumel = 8192;

}  // namespace

/// Until the first forward there are no unsharded tensors.
bool GradientState::any_unsharded() const {
  return std::ranges::any_of(shards_->parameters(), [](const ShardedParameter& parameter) {
    return parameter.unsharded().defined() && parameter.unsharded().grad().defined();
  });
}

void GradientState::drop_unsharded() {
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.drop_unsharded();
  }
}

void GradientState::drop_all() {
  drop_unsharded();
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.drop_gradient();
  }
}

/// In reduce_dtype, in which they will be summed: a narrower type would lose bits.
void GradientState::keep() {
  const c10::AutoGradMode no_grad(false);
  for (ShardedParameter& parameter : shards_->parameters()) {
    // Whether a gradient came differs between ranks; whether one might have come does not.
    if (!parameter.left_out() && (parameter.trainable() || parameter.has_kept())) {
      parameter.keep(parameter.take_unsharded(), shards_->layout().reduce_dtype());
    }
  }
}

void GradientState::lend_kept() {
  const c10::AutoGradMode no_grad(false);
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.lend_kept();
  }
}

bool GradientState::awaits_reduction() const {
  // Never from whether a gradient came: a rank that used no parameter must still take part.
  return std::ranges::any_of(shards_->parameters(), [this](const ShardedParameter& parameter) {
    return !parameter.left_out() &&
           (parameter.has_kept() || (settings_->all_reduce && parameter.has_left_to_replicas()));
  });
}

void GradientState::show_expected() {
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.show_expected();
  }
}

std::vector<ShardedParameter*> GradientState::accumulated() {
  std::vector<ShardedParameter*> parameters;
  for (ShardedParameter& parameter : shards_->parameters()) {
    if (parameter.accumulated()) {
      parameters.push_back(&parameter);
    }
  }
  return parameters;
}

/// The current settings: a later change applies to the next reduction.
ReductionOptions GradientState::reduction_options() const {
  const auto ranks = static_cast<double>(batch_ranks_.value_or(shards_->mesh().ranks()));
  return {.dtype = shards_->layout().reduce_dtype(),
          .divisor = settings_->gradient_divisor.value_or(ranks),
          .all_reduce = settings_->all_reduce,
          .force_sum = settings_->force_sum,
          .settings = settings_};
}

/// Once reduced, a NaN of one rank is on all of them. The host waits for the device: for debugging.
void GradientState::warn_of_nonfinite(const ShardedParameter& parameter,
                                      const at::Tensor& gradient) const {
  if (tessera::detail::debug_checks() && gradient.defined() &&
      !gradient.isfinite().all().item<bool>()) {
    TORCH_WARN("rank ", shards_->mesh().all.world()->rank(), ": the gradient of ",
               describe(*parameter.slot()),
               " is not finite before it is reduced; look at this rank's rows of the batch");
  }
}

/// Adds this backward's gradient to those of earlier ones; the sum is reduced.
UnshardedGradient GradientState::gradient_to_reduce(ShardedParameter& parameter) const {
  UnshardedGradient gradient = parameter.take_unsharded();
  warn_of_nonfinite(parameter, gradient.local);
  if (parameter.has_kept()) {
    parameter.keep(gradient, shards_->layout().reduce_dtype());
    gradient = parameter.take_kept();
  }
  // One rank needs no agreement: it goes by its own gradients.
  if (shards_->mesh().ranks() > 1) {
    PendingSum& sum = parameter.pending_sum();
    sum.note(gradient);
    gradient = converted(std::move(gradient), sum.group());
  }
  return gradient;
}

/// After the reduction a NaN of one rank is on all ranks. It is in all gradients that its rows have
/// reached, so the smallest gradient tells whose it was; checking all would slow down every step.
void GradientState::keep_sample(const std::vector<ShardedParameter*>& parameters,
                                const std::vector<UnshardedGradient>& gradients) {
  sampled_.reset();
  sample_.reset();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& gradient = gradients[i].local;
    const std::int64_t least = sample_.defined() ? sample_.numel() : kSampleNumel + 1;
    if (gradient.defined() && gradient.numel() > 0 && gradient.numel() < least) {
      sampled_ = parameters[i]->slot();
      sample_ = gradient;
    }
  }
}

bool GradientState::brought_nonfinite(const nn::ParameterSlot& slot) const {
  return sampled_.get() == &slot && !sample_.isfinite().all().item<bool>();
}

void GradientState::start_reduce(CommContext& context) {
  std::vector<ShardedParameter*> trainable;
  std::vector<UnshardedGradient> gradients;
  for (ShardedParameter& parameter : shards_->parameters()) {
    // All parameters that may have a gradient on any rank: what is sent never depends on the rank.
    // A parameter that was frozen since still has gradients of earlier micro-batches.
    if (parameter.left_out()) {
      continue;
    }
    if (parameter.trainable() || parameter.has_kept() || parameter.has_left_to_replicas()) {
      trainable.push_back(&parameter);
      gradients.push_back(gradient_to_reduce(parameter));
      parameter.expect();
    }
  }
  keep_sample(trainable, gradients);
  if (!trainable.empty()) {
    reduction_.emplace(std::move(trainable), std::move(gradients), shards_->mesh(),
                       reduction_options(), context);
  }
}

void GradientState::finish_reduce(CommContext& context) {
  if (reduction_) {
    reduction_->finish(context);
    reduction_.reset();
  }
}

void GradientState::forget_reduction(CommContext& context) {
  reduction_.reset();
  for (ShardedParameter& parameter : shards_->parameters()) {
    // The sums hold pointers to these parameters.
    context.sums().forget(&parameter);
    parameter.forget_arrivals();
  }
}

}  // namespace tessera::fsdp
