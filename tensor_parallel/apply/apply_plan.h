#pragma once

#include <memory>

#include "apply/plan_recorder.h"
#include "plan/checked_plan.h"

namespace tessera::tensor_parallel {

/// Distributes the parameters and adds the styles' hooks, seen by `recorder`, if any.
void apply_plan(const CheckedPlan& plan, nn::ModuleBase& module, const DeviceMesh& mesh,
                const std::shared_ptr<PlanRecorder>& recorder = nullptr);

}  // namespace tessera::tensor_parallel
