// Gradients between backward and the optimizer. With gradient sync a unit's are reduced at once;
// without, they are set aside unsharded (`kept_`) and go into the next reduction, which costs the
// memory of unsharded gradients and saves a collective a micro-batch.

#include "group/gradient_state.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace tessera::fsdp {

/// Until the first forward there are no unsharded tensors.
bool GradientState::any_unsharded() const {
  return std::ranges::any_of(shards_->parameters(), [](const ShardedParameter& parameter) {
    return parameter.unsharded().defined() && parameter.unsharded().grad().defined();
  });
}

void GradientState::drop_unsharded() {
  for (const ShardedParameter& parameter : shards_->parameters()) {
    if (parameter.unsharded().defined()) {
      parameter.unsharded().mutable_grad().reset();
    }
  }
}

void GradientState::drop_all() {
  drop_unsharded();
  kept_.clear();
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.drop_gradient();
  }
}

/// In reduce_dtype, in which they will be summed: adding up in a narrower type would lose bits.
void GradientState::keep() {
  const c10::AutoGradMode no_grad(false);
  std::vector<ShardedParameter>& parameters = shards_->parameters();
  // Beside all parameters, frozen ones too, so that the index is the parameter's.
  kept_.resize(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    add_gradient(kept_[i].sum, take_gradient(parameters[i].unsharded()),
                 shards_->layout().reduce_dtype());
    // Whether anything came differs between ranks; whether it might have, does not.
    kept_[i].expected |= parameters[i].trainable();
  }
}

bool GradientState::awaits_reduction() const {
  // From `expected`, never from whether a gradient came: a rank that used no parameter must still
  // take part.
  const bool kept = std::ranges::any_of(kept_, &KeptGradient::expected);
  return kept || (settings_->all_reduce &&
                  std::ranges::any_of(shards_->parameters(), &ShardedParameter::has_unreduced));
}

void GradientState::drop_kept(const nn::ParameterSlot& slot) {
  std::vector<ShardedParameter>& parameters = shards_->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].slot().get() == &slot) {
      // zero_grad: nothing is left to agree on.
      parameters[i].unreduced() = {};
      parameters[i].settle_use(true);
      if (!kept_.empty()) {
        kept_[i] = {};
      }
    }
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

/// As the settings are now: a later change is for the next reduction.
ReductionOptions GradientState::reduction_options() const {
  const auto ranks = static_cast<double>(shards_->mesh().ranks());
  return {.dtype = shards_->layout().reduce_dtype(),
          .divisor = settings_->gradient_divisor.value_or(ranks),
          .all_reduce = settings_->all_reduce,
          .force_sum = settings_->force_sum,
          .settings = settings_};
}

void GradientState::start_reduce(CommContext& context) {
  // This backward's are added to those of earlier ones, and the sum is reduced.
  if (!kept_.empty()) {
    keep();
  }
  std::vector<ShardedParameter*> trainable;
  std::vector<UnshardedGradient> gradients;
  std::vector<ShardedParameter>& parameters = shards_->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const bool kept = !kept_.empty() && kept_[i].expected;
    // All that any rank may have a gradient of: what is sent never depends on the rank. A parameter
    // that was frozen since still has what earlier micro-batches left.
    if (parameters[i].trainable() || kept || parameters[i].has_unreduced()) {
      trainable.push_back(&parameters[i]);
      // What was kept includes this backward's, by keep() above.
      gradients.push_back(kept_.empty() ? take_gradient(parameters[i].unsharded())
                                        : std::move(kept_[i].sum));
      // Peers get zeros for it; UseAgreement finds out whether any rank had values.
      if (gradients.back().local.defined()) {
        parameters[i].mark_used();
      }
      // One rank needs no agreement: it goes by its own gradients.
      if (shards_->mesh().ranks() > 1) {
        PendingSum& sum = parameters[i].pending_sum();
        sum.note(gradients.back());
        gradients.back() = converted(std::move(gradients.back()), sum.group());
      }
    }
  }
  kept_.clear();
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
