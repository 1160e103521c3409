#include "unit.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <functional>

#include "backward_hooks.h"
#include "mixed_precision.h"
#include "unit_parameters.h"

namespace tessera::fsdp {
namespace {

/// This module's unit and those below it, in the order of registration.
void collect_units(const torch::nn::Module& module, std::vector<std::shared_ptr<Unit>>& units) {
  if (const auto* ours = dynamic_cast<const nn::ModuleBase*>(&module)) {
    if (auto unit = ours->attached<Unit>()) {
      units.push_back(std::move(unit));
    }
  }
  for (const auto& child : module.children()) {
    collect_units(*child, units);
  }
}

}  // namespace

Unit::Unit(nn::ModuleBase& module, const DeviceMesh& mesh, const Options& options)
    : module_(module), options_(options) {
  for (std::vector<ShardedParameter>& parameters : shard_parameters(module, mesh)) {
    groups_.emplace_back(std::move(parameters), mesh, options.mp_policy);
  }
}

void Unit::install() {
  // The module owns this, and the hooks are the module's.
  module_.add_forward_pre_hook([this](auto&, nn::TensorList inputs) { pre_forward(inputs); });
  module_.add_forward_hook([this](auto&, nn::TensorList outputs) { post_forward(outputs); });
}

void Unit::start_unshard() {
  std::ranges::for_each(groups_, &ParameterGroup::start_unshard);
}

void Unit::unshard() {
  if (!prepared_) {
    std::ranges::for_each(groups_, &ParameterGroup::prepare);
    prepared_ = true;
  }
  start_unshard();
  std::ranges::for_each(groups_, &ParameterGroup::unshard);
}

void Unit::reshard() {
  std::ranges::for_each(groups_, &ParameterGroup::reshard);
}

void Unit::enter_as_root() {
  if (context_ == nullptr) {
    std::vector<std::shared_ptr<Unit>> units;
    collect_units(module_, units);
    context_ = std::make_shared<Context>(units);
    for (const std::shared_ptr<Unit>& unit : units) {
      unit->context_ = context_;
      unit->is_root_ = unit.get() == this;
    }
  }
  if (is_root_) {
    context_->begin_forward();
  }
}

void Unit::begin_iteration(bool stale) {
  in_backward_ = false;
  if (stale) {
    reshard();
  }
  std::ranges::for_each(groups_, &ParameterGroup::prepare);
  prepared_ = true;
}

void Unit::pre_forward(nn::TensorList inputs) {
  // In backward, activation checkpointing runs a part of the forward again.
  if (!in_backward_) {
    enter_as_root();
  }
  if (options_.mp_policy.cast_forward_inputs) {
    cast_floating(inputs, options_.mp_policy.param_dtype);
  }
  unshard();
  if (!in_backward_ && c10::GradMode::is_enabled()) {
    call_after_backward(inputs, [unit = shared_from_this()] { unit->post_backward(); });
  }
}

void Unit::post_forward(nn::TensorList outputs) {
  cast_floating(outputs, options_.mp_policy.output_dtype);
  if (!in_backward_) {
    await_backward(outputs);
  }
}

void Unit::await_backward(nn::TensorList outputs) {
  bool backward_comes = false;
  if (c10::GradMode::is_enabled()) {
    const auto token = std::make_shared<char>();
    backward_comes =
        call_before_backward(outputs, [unit = shared_from_this(), token] { unit->pre_backward(); });
    if (backward_comes) {
      context_->ran_forward(*this, token);
    }
  }
  if (!backward_comes || options_.reshard_after_forward.value_or(!is_root_)) {
    reshard();
  }
}

void Unit::pre_backward() {
  if (in_backward_) {
    return;
  }
  in_backward_ = true;
  context_->enter_backward();
  unshard();
  context_->prefetch_before(*this);
}

void Unit::post_backward() {
  if (!in_backward_) {
    return;
  }
  in_backward_ = false;
  reshard();
  context_->reduce(groups_);
}

void Unit::end_backward() {
  // A unit whose inputs need no gradient, or whose parameters got theirs after the inputs did.
  const bool late = std::ranges::any_of(groups_, &ParameterGroup::has_gradients);
  in_backward_ = in_backward_ || late;
  post_backward();
  reshard();
}

}  // namespace tessera::fsdp
