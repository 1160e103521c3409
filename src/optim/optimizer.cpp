// What all optimizers share, and the list of several as one.
#include "tessera/optim/optimizer.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <memory>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "local_shards.h"
#include "tessera/core/detail/environment_switch.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/copy_check.h"
#include "tessera/nn/detail/slot_keeper.h"
#include "tessera/optim/optimizer_list.h"

namespace tessera::optim {
namespace {

/// Attached to the module of the first parameter of lists that were compared: their lengths.
struct Compared {
  std::set<std::size_t> lengths;
};

/// nullptr for a parameter that no module owns.
std::shared_ptr<Compared> compared_lists(const nn::ParameterSlot& first) {
  if (first.owners().empty()) {
    return nullptr;
  }
  nn::ModuleBase& module = *first.owners().front().module;
  auto lists = module.attached<Compared>();
  if (lists == nullptr) {
    lists = std::make_shared<Compared>();
    module.attach(lists);
  }
  return lists;
}

struct Roots {
  std::vector<DeviceMesh> meshes;  ///< in the order of the parameters
  DeviceMesh largest;
};

Roots roots_of(const std::vector<nn::SlotPtr>& parameters) {
  Roots roots;
  for (const nn::SlotPtr& slot : parameters) {
    if (!tessera::is_distributed(slot->persistent())) {
      continue;
    }
    const DeviceMesh root = sharding_spec(slot->persistent()).mesh.root();
    if (std::ranges::find(roots.meshes, root) == roots.meshes.end()) {
      roots.meshes.push_back(root);
    }
    if (!roots.largest || root.size() > roots.largest.size()) {
      roots.largest = root;
    }
  }
  return roots;
}

std::vector<nn::detail::CopiedTensor> gradients_of(const std::vector<nn::SlotPtr>& parameters,
                                                   const DeviceMesh& root, bool with_plain) {
  std::vector<nn::detail::CopiedTensor> gradients;
  for (const nn::SlotPtr& slot : parameters) {
    const at::Tensor& parameter = slot->persistent();
    const bool distributed = tessera::is_distributed(parameter);
    if (!parameter.requires_grad() || local_tensor(parameter).is_meta() ||
        (distributed ? sharding_spec(parameter).mesh.root() != root : !with_plain)) {
      continue;
    }
    const at::Tensor gradient = slot_gradient(*slot);
    gradients.push_back({.name = "the gradient of " + nn::describe(*slot),
                         .slot = slot.get(),
                         .values = gradient.defined() ? local_tensor(gradient) : gradient,
                         .rounded = true});
  }
  return gradients;
}

}  // namespace

void check_gradient_copies(const std::vector<nn::SlotPtr>& parameters, const char* what,
                           const NormOptions& options) {
  if (parameters.empty()) {
    return;
  }
  const std::shared_ptr<Compared> lists = compared_lists(*parameters.front());
  if (lists != nullptr && lists->lengths.contains(parameters.size()) && !detail::debug_checks()) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  const Roots roots = roots_of(parameters);
  for (const DeviceMesh& root : roots.meshes) {
    if (!options.over && root.size() > 1 && root.contains_this_rank()) {
      nn::detail::check_copies(
          detail::peers_of(root), gradients_of(parameters, root, root == roots.largest),
          {.what = what, .distinct_along = options.distinct_along, .root = root});
    }
  }
  if (lists != nullptr) {
    lists->lengths.insert(parameters.size());
  }
}

/// The flag spares later steps the look at the list.
void Optimizer::check_copies() {
  if (!compared_ || detail::debug_checks()) {
    check_gradient_copies(parameters(), "Optimizer::step");
    compared_ = true;
  }
}

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
