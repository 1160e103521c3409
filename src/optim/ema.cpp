// The average is an optimizer around another one: code that steps, saves and resumes an optimizer
// handles the average too.

#include "tessera/optim/ema.h"

#include <c10/core/GradMode.h>

#include <utility>

#include "local_shards.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::optim {

Ema::Ema(std::shared_ptr<Optimizer> inner, double decay) : inner_(std::move(inner)), decay_(decay) {
  TESSERA_CHECK(inner_ != nullptr, "an Ema was given a null optimizer; construct that first");
  TESSERA_CHECK(decay >= 0.0 && decay < 1.0, "an Ema with decay ", decay,
                " was asked for; it must be in [0, 1)");
}

/// A step would train the averages, and a checkpoint hold one for the other.
void Ema::check_not_swapped() const {
  TESSERA_CHECK(!swapped_, "Ema: a step or the state was asked for while the parameters are the ",
                "averages; call swap() again first");
}

/// Before anything is changed, as SlotOptimizer does for its state.
void Ema::check_sizes(std::size_t index) const {
  const at::Tensor& local = local_tensor(parameters()[index]->persistent());
  const at::Tensor& average = averages_[index];
  TESSERA_CHECK(average.sizes() == local.sizes() && average.device() == local.device(),
                "Ema: the local shard of ", nn::describe(*parameters()[index]), " has sizes ",
                local.sizes(), " on ", local.device(), " but had ", average.sizes(), " on ",
                average.device(), " when its average began; apply TP and FSDP and move the module ",
                "before the first step and before the state is asked for");
}

/// Not in the constructor: parameters are filled, split and moved after it.
void Ema::make_averages() {
  averages_.resize(parameters().size());
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    const at::Tensor& parameter = parameters()[i]->persistent();
    if (averages_[i].defined()) {
      check_sizes(i);
    } else if (parameter.requires_grad()) {
      const at::Tensor& local = local_tensor(parameter);
      averages_[i] = local.detach().to(update_type(local.scalar_type()), /*non_blocking=*/false,
                                       /*copy=*/true);
    }
  }
}

/// state() has only shown an average that nothing has written yet. A load may have filled the
/// parameter since.
void Ema::begin_averages() {
  make_averages();
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    if (averages_[i].defined() && tessera::detail::writes_of(averages_[i]) == 0) {
      averages_[i].copy_(local_tensor(parameters()[i]->persistent()).detach());
    }
  }
}

template <class Factor>
void Ema::step_inner(const Factor& gradient_factor) {
  check_not_swapped();
  const c10::AutoGradMode no_grad(false);
  begin_averages();
  inner_->step(gradient_factor);
  average();
}

void Ema::update(double gradient_factor) {
  step_inner(gradient_factor);
}

void Ema::update_scaled(const at::Tensor& gradient_factor) {
  step_inner(gradient_factor);
}

void Ema::average() {
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    if (averages_[i].defined()) {
      const at::Tensor local = local_tensor(parameters()[i]->persistent()).detach();
      averages_[i].lerp_(local.to(averages_[i].scalar_type()), 1.0 - decay_);
    }
  }
}

std::vector<StateTensor> Ema::state() {
  check_not_swapped();
  const c10::AutoGradMode no_grad(false);
  std::vector<StateTensor> all = inner_->state();
  make_averages();
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    if (averages_[i].defined()) {
      const nn::SlotPtr& slot = parameters()[i];
      all.push_back({slot, "ema", with_layout_of(slot->persistent(), averages_[i])});
    }
  }
  return all;
}

/// All are checked before the first is exchanged.
void Ema::swap() {
  const c10::AutoGradMode no_grad(false);
  begin_averages();
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    TESSERA_CHECK(
        !averages_[i].defined() ||
            local_tensor(parameters()[i]->persistent()).scalar_type() == averages_[i].scalar_type(),
        "Ema::swap: ", nn::describe(*parameters()[i]),
        " is narrower than its average; keep parameters in fp32 and compute in another "
        "type (fsdp::MixedPrecisionPolicy)");
  }
  swapped_ = !swapped_;
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    if (!averages_[i].defined()) {
      continue;
    }
    const at::Tensor local = local_tensor(parameters()[i]->persistent()).detach();
    const at::Tensor kept = local.clone();
    local.copy_(averages_[i]);
    averages_[i].copy_(kept);
  }
}

}  // namespace tessera::optim
