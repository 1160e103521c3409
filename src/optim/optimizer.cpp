// What all optimizers share, and the list of several as one.
#include "tessera/optim/optimizer.h"

#include <c10/core/GradMode.h>

#include <unordered_map>
#include <unordered_set>

#include "local_shards.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/slots.h"
#include "tessera/optim/optimizer_list.h"

namespace tessera::optim {

void Optimizer::zero_grad() {
  for (const nn::SlotPtr& slot : parameters()) {
    nn::drop_gradient(*slot);
  }
}

void Optimizer::update_scaled(const at::Tensor& gradient_factor) {
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> gradients;
  for (const nn::SlotPtr& slot : parameters()) {
    const at::Tensor gradient = slot_gradient(*slot);
    if (gradient.defined()) {
      gradients.push_back(local_tensor(gradient));
    }
  }
  scale_by(gradients, gradient_factor);
  update(1.0);
}

/// Slots and not tensors: FSDP and TP replace the tensors in them.
std::vector<nn::SlotPtr> slots_of(const nn::ModuleBase& module) {
  std::vector<nn::SlotPtr> slots;
  for (auto& [name, slot] : module.named_slots()) {
    slots.push_back(slot);
  }
  return slots;
}

/// "layers.0.weight.exp_avg": checkpoints store state under the names of parameters, which do not
/// depend on their order in the optimizer.
std::vector<std::pair<std::string, at::Tensor>> named_state(Optimizer& optimizer,
                                                            const nn::ModuleBase& module) {
  std::unordered_map<const nn::ParameterSlot*, std::string> names;
  for (const auto& [name, slot] : module.named_slots()) {
    names.emplace(slot.get(), name);
  }
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (StateTensor& state : optimizer.state()) {
    const auto found = names.find(state.slot.get());
    TESSERA_CHECK(found != names.end(), "the optimizer updates ", nn::describe(*state.slot),
                  " that is not in the module whose names were asked for; pass the module that the "
                  "optimizer was made for");
    named.emplace_back(found->second + "." + state.name, std::move(state.tensor));
  }
  return named;
}

/// One slot in two optimizers would be updated twice a step.
OptimizerList::OptimizerList(std::vector<std::shared_ptr<Optimizer>> optimizers)
    : optimizers_(std::move(optimizers)) {
  std::unordered_set<const nn::ParameterSlot*> seen;
  for (const auto& optimizer : optimizers_) {
    TESSERA_CHECK(optimizer != nullptr,
                  "an OptimizerList was given a null optimizer; construct all of them first");
    for (const nn::SlotPtr& slot : optimizer->parameters()) {
      TESSERA_CHECK(seen.insert(slot.get()).second, nn::describe(*slot),
                    " was given to two optimizers of a list; give it to one of them");
      parameters_.push_back(slot);
    }
  }
}

void OptimizerList::update(double gradient_factor) {
  for (const auto& optimizer : optimizers_) {
    optimizer->step(gradient_factor);
  }
}

void OptimizerList::update_scaled(const at::Tensor& gradient_factor) {
  for (const auto& optimizer : optimizers_) {
    optimizer->step(gradient_factor);
  }
}

void OptimizerList::scale_lr(double factor) {
  for (const auto& optimizer : optimizers_) {
    optimizer->scale_lr(factor);
  }
}

std::vector<StateTensor> OptimizerList::state() {
  std::vector<StateTensor> all;
  for (const auto& optimizer : optimizers_) {
    for (StateTensor& state : optimizer->state()) {
      all.push_back(std::move(state));
    }
  }
  return all;
}

}  // namespace tessera::optim
