// The base of optimizers over slots: which parameters a step updates, their state, and checks. What
// is done with the shards is up to the derived class (update_shards).
#include "tessera/optim/slot_optimizer.h"

#include <c10/core/GradMode.h>

#include <unordered_map>

#include "local_shards.h"
#include "tessera/comm/trace.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::optim {

/// No state is made yet: TP and FSDP may still be applied, which changes sizes and devices.
SlotOptimizer::SlotOptimizer(std::vector<std::vector<nn::SlotPtr>> groups,
                             std::vector<std::string> state_names, bool counts_steps)
    : state_names_(std::move(state_names)), counts_steps_(counts_steps) {
  std::unordered_map<const nn::ParameterSlot*, std::size_t> seen;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (nn::SlotPtr& slot : groups[group]) {
      TESSERA_CHECK(slot != nullptr, "an optimizer was given a null slot in group ", group,
                    "; pass those of parameters, such as optim::slots_of(module)");
      const auto [found, is_new] = seen.emplace(slot.get(), group);
      TESSERA_CHECK(found->second == group, nn::describe(*slot), " is in the groups ",
                    found->second, " and ", group, " of an optimizer; put it in one of them");
      if (!is_new) {
        continue;
      }
      parameters_.push_back(std::move(slot));
      group_of_.push_back(group);
    }
  }
  TESSERA_CHECK(!parameters_.empty(),
                "an optimizer was given no parameters, of which there must be ",
                "one or more; pass optim::slots_of(module), or leave the optimizer out");
  states_.resize(parameters_.size());
}

/// Before any parameter is changed, so that a failed step leaves all of them as they were.
void SlotOptimizer::check_parameter(std::size_t index) const {
  const nn::ParameterSlot& slot = *parameters_[index];
  TESSERA_CHECK(slot.initialized(), "an optimizer was to update ", nn::describe(slot),
                " that nobody has filled; call nn::init_weights or load values first");
  if (states_[index].tensors.empty()) {
    return;
  }
  const at::Tensor& local = local_tensor(slot.persistent());
  const at::Tensor& state = states_[index].tensors[0];
  const c10::ScalarType type = state_dtype(group_of_[index], local.scalar_type());
  TESSERA_CHECK(state.scalar_type() == type, "the optimizer's state of ", nn::describe(slot),
                ", a ", local.scalar_type(), ", is ", state.scalar_type(),
                ", but would be made as ", type,
                " now; change the type of a parameter or of its state before the first step");
  TESSERA_CHECK(state.sizes() == local.sizes() && state.device() == local.device(),
                "the local shard of a parameter has sizes ", local.sizes(), " on ", local.device(),
                " but had ", state.sizes(), " on ", state.device(),
                " when the optimizer first updated it; apply TP and FSDP and move the module "
                "before the first step");
}

/// For all that lack it at once, so that states of neighbours adjoin as the shards do
/// (zeros_beside). In later steps nothing is missing.
void SlotOptimizer::make_states(const std::vector<std::size_t>& indices) {
  std::vector<std::size_t> missing;
  std::vector<at::Tensor> locals;
  std::vector<c10::ScalarType> dtypes;
  for (const std::size_t index : indices) {
    const State& state = states_[index];
    const bool lacks = counts_steps_ ? !state.step.defined() : state.tensors.empty();
    if (lacks && (counts_steps_ || !state_names_.empty())) {
      missing.push_back(index);
      locals.push_back(local_tensor(parameters_[index]->persistent()));
      dtypes.push_back(state_dtype(group_of_[index], locals.back().scalar_type()));
    }
  }
  // One buffer for each name: states of one name adjoin, as the kernel takes them.
  for (std::size_t which = 0; which < state_names_.size(); ++which) {
    const std::vector<at::Tensor> zeros = zeros_beside(locals, dtypes);
    for (std::size_t i = 0; i < missing.size(); ++i) {
      states_[missing[i]].tensors.push_back(zeros[i]);
    }
  }
  if (!counts_steps_) {
    return;
  }
  const std::vector<at::Tensor> counters = counters_beside(locals);
  for (std::size_t i = 0; i < missing.size(); ++i) {
    states_[missing[i]].step = counters[i];
  }
}

c10::ScalarType SlotOptimizer::state_dtype(std::size_t /*group*/, c10::ScalarType parameter) const {
  return update_type(parameter);
}

void SlotOptimizer::update(double gradient_factor) {
  const comm::CallerScope caller("optimizer step");
  const c10::AutoGradMode no_grad(false);
  update_shards(begin_step(), gradient_factor);
  note_counters();
}

void SlotOptimizer::update_scaled(const at::Tensor& gradient_factor) {
  const comm::CallerScope caller("optimizer step");
  const c10::AutoGradMode no_grad(false);
  update_shards_scaled(begin_step(), gradient_factor);
  note_counters();
}

void SlotOptimizer::update_shards_scaled(const std::vector<ShardUpdate>& shards,
                                         const at::Tensor& gradient_factor) {
  std::vector<at::Tensor> gradients;
  for (const ShardUpdate& shard : shards) {
    if (shard.gradient.defined()) {
      gradients.push_back(shard.gradient);
    }
  }
  scale_by(merge_adjoining(gradients), gradient_factor);
  update_shards(shards, 1.0);
}

/// The shards that a step updates, with gradients, checked and with state.
std::vector<ShardUpdate> SlotOptimizer::begin_step() {
  check_rates();
  std::vector<ShardUpdate> shards;
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    // Collective for pending sums, and therefore in the order of the parameters, the same on every
    // rank.
    const at::Tensor grad = slot_gradient(*parameters_[i]);
    const at::Tensor& parameter = parameters_[i]->persistent();
    if (!grad.defined() && !updates_without_gradient(parameter)) {
      continue;
    }
    check_parameter(i);
    shards.push_back({i, group_of_[i], local_tensor(parameter),
                      grad.defined() ? local_tensor(grad) : at::Tensor()});
    indices.push_back(i);
  }
  make_states(indices);
  read_counters();
  return shards;
}

/// Makes what is missing, so that a checkpoint can be loaded before the first step. The tensors are
/// the state itself: loading writes into them.
std::vector<StateTensor> SlotOptimizer::state() {
  const c10::AutoGradMode no_grad(false);
  std::vector<std::size_t> shown;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    check_parameter(i);
    // One that is frozen has state only if it was trained before.
    if (parameters_[i]->persistent().requires_grad() || states_[i].step.defined() ||
        !states_[i].tensors.empty()) {
      shown.push_back(i);
    }
  }
  make_states(shown);
  std::vector<StateTensor> list;
  for (const std::size_t i : shown) {
    const nn::SlotPtr& slot = parameters_[i];
    for (std::size_t which = 0; which < state_names_.size(); ++which) {
      list.push_back({slot, state_names_[which],
                      with_layout_of(slot->persistent(), states_[i].tensors[which])});
    }
    if (counts_steps_) {
      list.push_back({slot, "step", states_[i].step});
    }
  }
  return list;
}

/// Waits for the device once after a load, and never in other steps.
void SlotOptimizer::read_counters() {
  for (State& state : states_) {
    if (state.step.defined() && tessera::detail::writes_of(state.step) != state.writes) {
      state.steps = static_cast<std::int64_t>(state.step.item<double>());
    }
  }
}

/// What writes to a counter from now on is not a step of this optimizer.
void SlotOptimizer::note_counters() {
  for (State& state : states_) {
    state.writes = state.step.defined() ? tessera::detail::writes_of(state.step) : 0;
  }
}

}  // namespace tessera::optim
