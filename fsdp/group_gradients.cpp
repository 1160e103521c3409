// The gradients of a ParameterGroup: set aside, reduced, dropped.
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "parameter_group.h"
#include "use_agreement.h"

namespace tessera::fsdp {

bool ParameterGroup::has_gradients() const {
  return std::ranges::any_of(parameters_, [](const ShardedParameter& parameter) {
    return parameter.whole().defined() && parameter.whole().grad().defined();
  });
}

void ParameterGroup::drop_gradients() {
  for (const ShardedParameter& parameter : parameters_) {
    if (parameter.whole().defined()) {
      parameter.whole().mutable_grad().reset();
    }
  }
}

void ParameterGroup::keep_gradients() {
  const c10::AutoGradMode no_grad(false);
  kept_gradients_.resize(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    add_gradient(kept_gradients_[i].sum, take_gradient(parameters_[i].whole()), reduce_dtype_);
    kept_gradients_[i].expected |= parameters_[i].trainable();
  }
}

void ParameterGroup::drop_all_gradients() {
  drop_gradients();
  kept_gradients_.clear();
  for (ShardedParameter& parameter : parameters_) {
    parameter.drop_gradient();
  }
}

bool ParameterGroup::awaits_reduction() const {
  const bool kept = std::ranges::any_of(kept_gradients_, &KeptGradient::expected);
  return kept ||
         (all_reduce_ && std::ranges::any_of(parameters_, &ShardedParameter::has_unreduced));
}

void ParameterGroup::drop_kept_gradient(const nn::ParameterSlot& slot) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].slot().get() == &slot) {
      parameters_[i].unreduced() = {};
      parameters_[i].settle_use(true);
      if (!kept_gradients_.empty()) {
        kept_gradients_[i] = {};
      }
    }
  }
}

void ParameterGroup::add_accumulated(UseAgreement& agreement) {
  for (ShardedParameter& parameter : parameters_) {
    if (parameter.accumulated()) {
      agreement.add(mesh_, parameter);
    }
  }
}

void ParameterGroup::start_reduce(Communication& communication) {
  if (!kept_gradients_.empty()) {
    keep_gradients();
  }
  std::vector<ShardedParameter*> trainable;
  std::vector<WholeGradient> gradients;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool kept = !kept_gradients_.empty() && kept_gradients_[i].expected;
    if (parameters_[i].trainable() || kept || parameters_[i].has_unreduced()) {
      trainable.push_back(&parameters_[i]);
      gradients.push_back(kept_gradients_.empty() ? take_gradient(parameters_[i].whole())
                                                  : std::move(kept_gradients_[i].sum));
      if (gradients.back().local.defined()) {
        parameters_[i].mark_used();
      }
    }
  }
  kept_gradients_.clear();
  if (!trainable.empty()) {
    reduction_.emplace(std::move(trainable), std::move(gradients), mesh_,
                       ReductionOptions{.dtype = reduce_dtype_,
                                        .divisor = gradient_divisor_,
                                        .all_reduce = all_reduce_,
                                        .force_sum = force_sum_,
                                        .hooks = hooks_,
                                        .label = label_},
                       communication);
  }
}

void ParameterGroup::finish_reduce(Communication& communication) {
  if (reduction_) {
    reduction_->finish(communication);
    reduction_.reset();
  }
}

void ParameterGroup::forget_reduction(Communication& communication) {
  reduction_.reset();
  for (const ShardedParameter& parameter : parameters_) {
    communication.sums().forget(&parameter);
  }
}

}  // namespace tessera::fsdp
