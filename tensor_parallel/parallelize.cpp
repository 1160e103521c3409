// parallelize_module: applies a plan of styles to the modules that its patterns match. The plan is
// checked first, then all parameters are distributed, then hooks are added, so that a plan with an
// error changes nothing.

#include "tessera/tensor_parallel/parallelize.h"

#include "pending_gradients.h"
#include "plan/checked_plan.h"
#include "plan/plan_recorder.h"
#include "region.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/distribute_module.h"

namespace tessera::tensor_parallel {
namespace {

void distribute_parameters(const CheckedPlan& plan, const DeviceMesh& mesh) {
  for (const auto& [slot, placement] : plan.parameters) {
    // A tied parameter that an earlier call distributed was compared.
    if (!tessera::is_distributed(slot->get())) {
      nn::distribute_parameter(*slot, mesh, {placement}, "parallelize_module");
    }
  }
}

/// Parameters that the style replicates may get gradients that are pending sums. Watched at every
/// call, because the tensors in the slots change (nn::to_empty, FSDP).
void watch_replicated(const Application& application,
                      const std::shared_ptr<PendingGradients>& pending) {
  std::vector<nn::SlotPtr> slots;
  for (const auto& [slot, placement] : application.style->parameters(*application.target.module)) {
    if (is_replicate(placement)) {
      slots.push_back(slot);
    }
  }
  if (!slots.empty()) {
    application.target.module->add_forward_pre_hook(
        [pending, slots](auto&, nn::TensorList) { pending->watch(slots); });
  }
}

/// Within its forward plain tensors may be parts of what one rank has, and random operators draw
/// for these.
void add_random_region(nn::ModuleBase& module) {
  using tessera::detail::RandomRegion;
  using tessera::detail::RandomRegionScope;
  // Several, should the module call itself.
  const auto scopes = std::make_shared<std::vector<std::unique_ptr<RandomRegionScope>>>();
  module.add_forward_pre_hook([scopes](auto&, nn::TensorList) {
    scopes->push_back(std::make_unique<RandomRegionScope>(
        std::make_shared<RandomRegion>(tessera::detail::random_region(), nullptr)));
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
  // First, so that styles' hooks are within.
  add_random_region(module);
  // One for the call, so that the sums of all its modules are one all-reduce.
  const auto pending = std::make_shared<PendingGradients>();
  const auto region = std::make_shared<Region>(module, mesh);
  region->watch_root(module);
  for (std::size_t i = 0; i < plan.applications.size(); ++i) {
    const Application& application = plan.applications[i];
    nn::ModuleBase& target = *application.target.module;
    region->add(target, application.target.fqn, application.style->name() == "leave_plain");
    // Its hook comes first, before the style's operators use the parameters.
    watch_replicated(application, pending);
    if (recorder != nullptr) {
      recorder->begin_style(target);
    }
    application.style->apply(target, mesh);
    if (recorder != nullptr) {
      recorder->end_style(target, i);
    }
  }
}

void parallelize_module(nn::ModuleBase& module, const DeviceMesh& mesh,
                        const ParallelizePlan& plan) {
  apply_plan(check_entries(module, mesh, plan), module, mesh);
}

}  // namespace tessera::tensor_parallel
