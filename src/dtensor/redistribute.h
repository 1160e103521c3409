#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tensor_spec.h"
#include "tessera/core/redistribute_plan.h"
#include "transfer.h"

namespace tessera::detail {

using PlanPtr = std::shared_ptr<const Plan>;

/// Whether a step is a collective.
inline bool communicates(const Step& step) {
  return step.kind == StepKind::kAllGather || step.kind == StepKind::kReduceScatter ||
         step.kind == StepKind::kAllReduce || step.kind == StepKind::kAllToAll;
}

/// The plan from `spec`'s layout to `target`, from a bounded cache of this thread.
PlanPtr plan_for(const TensorSpecPtr& spec, LayoutPtr target);
/// Empties that cache.
void clear_plans();

/// Runs a plan on this rank's part of a tensor of global `sizes`. Collective over the groups that
/// the plan names. The result may share memory with `local`. A meta tensor moves no data.
/// Below autograd: no gradient.
at::Tensor run_plan(const Plan& plan, at::Tensor local, const DeviceMesh& mesh,
                    c10::IntArrayRef sizes);

/// The same up to the last collective, which is then under way. nullptr, and nothing is done, for a
/// plan without one.
TransferPtr start_plan(PlanPtr plan, at::Tensor local, const DeviceMesh& mesh,
                       c10::IntArrayRef sizes);

/// This rank's part of a tensor of `spec`, brought to `target`.
at::Tensor redistribute_local(const at::Tensor& local, const TensorSpecPtr& spec, LayoutPtr target);

}  // namespace tessera::detail
