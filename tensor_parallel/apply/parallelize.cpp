// parallelize_module: applies a plan of styles to the modules that its patterns match. The plan is
// checked first, then all parameters are distributed, then hooks are added, so that a plan with an
// error changes nothing.

#include "tessera/tensor_parallel/parallelize.h"

#include <memory>
#include <utility>
#include <vector>

#include "apply/apply_plan.h"
#include "apply/plan_recorder.h"
#include "equal_copies.h"
#include "pending_gradients.h"
#include "plan/checked_plan.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/held_part.h"
#include "tessera/nn/detail/retired_parameter.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::tensor_parallel {
namespace {

using tessera::detail::RandomRegion;
using tessera::detail::RandomRegionScope;

/// Undoes the replication by an earlier plan that did not name the parameter: each rank has it all.
void make_plain(nn::ParameterSlot& slot) {
  const at::Tensor before = slot.get();
  slot.swap(local_tensor(before).detach().requires_grad_(before.requires_grad()));
  slot.set_replicated_by_default(false);
  if (before.requires_grad()) {
    nn::retire_parameter(before, slot.get(), "parallelize_module");
  }
}

void distribute_parameters(const CheckedPlan& plan, const DeviceMesh& mesh) {
  for (const auto& [slot, placement] : plan.parameters) {
    if (slot->replicated_by_default()) {
      make_plain(*slot);
    }
    // A tied parameter that an earlier call distributed has been checked already.
    if (!tessera::is_distributed(slot->get())) {
      nn::distribute_parameter(*slot, mesh, {placement}, "parallelize_module");
    }
  }
  for (const auto& [fqn, slot] : plan.unnamed) {
    nn::distribute_parameter(*slot, mesh, {Replicate{}}, "parallelize_module");
    slot->set_replicated_by_default(true);
  }
}

std::vector<nn::SlotPtr> replicated_by(const Application& application) {
  std::vector<nn::SlotPtr> slots;
  for (const auto& [slot, placement] : application.parameters) {
    if (is_replicate(placement)) {
      slots.push_back(slot);
    }
  }
  return slots;
}

std::vector<nn::SlotPtr> slots_of(const nn::NamedSlots& named) {
  std::vector<nn::SlotPtr> slots;
  for (const auto& [fqn, slot] : named) {
    slots.push_back(slot);
  }
  return slots;
}

/// Replicated parameters may get gradients that are pending sums. Watched at every call, because
/// the tensors in the slots change (nn::to_empty, FSDP).
void watch_replicated(nn::ModuleBase& module, std::vector<nn::SlotPtr> slots,
                      const std::shared_ptr<PendingGradients>& pending) {
  if (!slots.empty()) {
    module.add_forward_pre_hook(
        [pending, slots = std::move(slots)](auto&, nn::TensorList) { pending->watch(slots); });
  }
}

/// Within the module's forward plain tensors are the same on every rank of `mesh`. A module with a
/// style may also be called directly, not through the root.
void add_parallel_forward(nn::ModuleBase& module, const DeviceMesh& mesh) {
  // Several if the module calls itself; empty within the forward of another.
  const auto scopes = std::make_shared<std::vector<std::unique_ptr<RandomRegionScope>>>();
  module.add_forward_pre_hook([scopes, mesh](auto&, nn::TensorList) {
    const tessera::detail::RandomRegionPtr& outer = tessera::detail::random_region();
    std::unique_ptr<RandomRegionScope>& scope = scopes->emplace_back();
    if (outer == nullptr || !outer->replicates_on(mesh)) {
      scope =
          std::make_unique<RandomRegionScope>(std::make_shared<RandomRegion>(outer, nullptr, mesh));
    }
  });
  module.add_always_hook([scopes] {
    // Another hook may have thrown before ours ran.
    if (!scopes->empty()) {
      scopes->pop_back();
    }
  });
}

}  // namespace

void apply_plan(const CheckedPlan& plan, nn::ModuleBase& module, const DeviceMesh& mesh,
                const std::shared_ptr<PlanRecorder>& recorder) {
  distribute_parameters(plan, mesh);
  if (recorder != nullptr) {
    recorder->watch_root(module);
  }
  // First, so that the styles' hooks run inside it.
  add_parallel_forward(module, mesh);
  // One for this call, so that the sums of all its modules are one all-reduce.
  const auto pending = std::make_shared<PendingGradients>();
  watch_replicated(module, slots_of(plan.unnamed), pending);
  const auto copies = std::make_shared<EqualCopies>(module, mesh);
  for (std::size_t i = 0; i < plan.applications.size(); ++i) {
    const Application& application = plan.applications[i];
    nn::ModuleBase& target = *application.target.module;
    if (copies->add(target, application.target.fqn) && &target != &module) {
      add_parallel_forward(target, mesh);
    }
    // A part of what nn::Hooked holds runs no hooks: the root's see to its parameters.
    const bool is_called = dynamic_cast<const nn::HeldPart*>(&target) == nullptr;
    // Before the style's operators use the parameters.
    watch_replicated(is_called ? target : module, replicated_by(application), pending);
    if (!is_called) {
      continue;
    }
    if (recorder != nullptr) {
      recorder->begin_style(target);
    }
    application.style->apply(target, mesh);
    if (recorder != nullptr) {
      recorder->end_style(target, i);
    }
  }
  copies->watch_root(module);
}

void parallelize_module(nn::ModuleBase& module, const DeviceMesh& mesh,
                        const ParallelizePlan& plan) {
  apply_plan(check_entries(module, mesh, plan), module, mesh);
}

}  // namespace tessera::tensor_parallel
