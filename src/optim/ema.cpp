// The average is an optimizer around another one: code that steps, saves and resumes an optimizer
// handles the average too.

#include "tessera/optim/ema.h"

#include <c10/core/GradMode.h>

#include <utility>

#include "local_shards.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::optim {

Ema::Ema(std::shared_ptr<Optimizer> inner, double decay) : inner_(std::move(inner)), decay_(decay) {
  TESSERA_CHECK(decay >= 0.0 && decay < 1.0, "an Ema with decay ", decay,
                " was asked for; it must be in [0, 1)");
}

/// Not in the constructor: parameters are filled, split and moved after it.
void Ema::make_averages() {
  averages_.resize(parameters().size());
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    const at::Tensor& parameter = parameters()[i]->persistent();
    if (!averages_[i].defined() && parameter.requires_grad()) {
      const at::Tensor& local = local_tensor(parameter);
      averages_[i] = local.detach().to(update_type(local.scalar_type()), /*non_blocking=*/false,
                                       /*copy=*/true);
    }
  }
}

void Ema::update(double gradient_factor) {
  const c10::AutoGradMode no_grad(false);
  make_averages();
  inner_->step(gradient_factor);
  average();
}

void Ema::update_scaled(const at::Tensor& gradient_factor) {
  const c10::AutoGradMode no_grad(false);
  make_averages();
  inner_->step(gradient_factor);
  average();
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

void Ema::swap() {
  const c10::AutoGradMode no_grad(false);
  make_averages();
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    if (!averages_[i].defined()) {
      continue;
    }
    const at::Tensor local = local_tensor(parameters()[i]->persistent()).detach();
    TESSERA_CHECK(local.scalar_type() == averages_[i].scalar_type(),
                  "Ema::swap: ", nn::describe(*parameters()[i]),
                  " is narrower than its average; keep parameters in fp32 and compute in another "
                  "type (fsdp::MixedPrecisionPolicy)");
    const at::Tensor kept = local.clone();
    local.copy_(averages_[i]);
    averages_[i].copy_(kept);
  }
}

}  // namespace tessera::optim
