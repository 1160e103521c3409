#include "tessera/optim/slot_optimizer.h"

#include <c10/core/GradMode.h>

#include <unordered_map>

#include "shard_states.h"
#include "slot_gradient.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::optim {

SlotOptimizer::SlotOptimizer(std::vector<std::vector<nn::SlotPtr>> groups,
                             std::vector<std::string> state_names, bool counts_steps)
    : state_names_(std::move(state_names)), counts_steps_(counts_steps) {
  std::unordered_map<const nn::ParameterSlot*, std::size_t> seen;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (nn::SlotPtr& slot : groups[group]) {
      const auto [found, is_new] = seen.emplace(slot.get(), group);
      TESSERA_CHECK(found->second == group, "a parameter of sizes ", slot->persistent().sizes(),
                    " is in the groups ", found->second, " and ", group,
                    " of an optimizer; put it in one of them");
      if (!is_new) continue;
      parameters_.push_back(std::move(slot));
      group_of_.push_back(group);
    }
  }
  states_.resize(parameters_.size());
}

void SlotOptimizer::check_parameter(std::size_t index) const {
  const nn::ParameterSlot& slot = *parameters_[index];
  TESSERA_CHECK(slot.initialized(), "an optimizer was to update a parameter of sizes ",
                slot.persistent().sizes(),
                " that nobody has filled; call nn::init_weights or load values first");
  if (states_[index].tensors.empty()) return;
  const at::Tensor& local = local_tensor(slot.persistent());
  const at::Tensor& state = states_[index].tensors[0];
  TESSERA_CHECK(state.sizes() == local.sizes() && state.device() == local.device(),
                "the local shard of a parameter has sizes ", local.sizes(), " on ", local.device(),
                " but had ", state.sizes(), " on ", state.device(),
                " when the optimizer first updated it; apply TP and FSDP and move the module "
                "before the first step");
}

void SlotOptimizer::make_states(const std::vector<std::size_t>& indices) {
  std::vector<std::size_t> missing;
  std::vector<at::Tensor> locals;
  for (const std::size_t index : indices) {
    if (states_[index].tensors.empty() && !state_names_.empty()) {
      missing.push_back(index);
      locals.push_back(local_tensor(parameters_[index]->persistent()));
    }
  }
  for (std::size_t which = 0; which < state_names_.size(); ++which) {
    const std::vector<at::Tensor> zeros = zeros_beside(locals);
    for (std::size_t i = 0; i < missing.size(); ++i) {
      states_[missing[i]].tensors.push_back(zeros[i]);
    }
  }
  if (!counts_steps_) return;
  const std::vector<at::Tensor> counters = counters_beside(locals);
  for (std::size_t i = 0; i < missing.size(); ++i) states_[missing[i]].step = counters[i];
}

void SlotOptimizer::update(double gradient_factor) {
  const c10::AutoGradMode no_grad(false);
  std::vector<ShardUpdate> shards;
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor grad = slot_gradient(*parameters_[i]);
    const at::Tensor& parameter = parameters_[i]->persistent();
    if (!grad.defined() && !updates_without_gradient(parameter)) continue;
    check_parameter(i);
    shards.push_back({i, group_of_[i], local_tensor(parameter),
                      grad.defined() ? local_tensor(grad) : at::Tensor()});
    indices.push_back(i);
  }
  make_states(indices);
  read_counters();
  update_shards(shards, gradient_factor);
}

std::vector<StateTensor> SlotOptimizer::state() {
  const c10::AutoGradMode no_grad(false);
  std::vector<std::size_t> all;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    check_parameter(i);
    all.push_back(i);
  }
  make_states(all);
  counters_shown_ = true;
  std::vector<StateTensor> list;
  for (const std::size_t i : all) {
    const nn::SlotPtr& slot = parameters_[i];
    for (std::size_t which = 0; which < state_names_.size(); ++which) {
      list.push_back({slot, state_names_[which], lying_as(slot->persistent(), state_of(i, which))});
    }
    if (counts_steps_) list.push_back({slot, "step", states_[i].step});
  }
  return list;
}

void SlotOptimizer::read_counters() {
  if (!counters_shown_ || !counts_steps_) return;
  counters_shown_ = false;
  for (State& state : states_) {
    if (state.step.defined()) state.steps = static_cast<std::int64_t>(state.step.item<double>());
  }
}

}  // namespace tessera::optim
