#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <string_view>

#include "rank/transfer.h"
#include "tensor/tensor_spec.h"
#include "tessera/core/layout.h"
#include "tessera/core/redistribute_plan.h"

namespace tessera::detail {

// On one mesh.

using RedistributionPlanPtr = std::shared_ptr<const RedistributionPlan>;

/// Whether a step is a collective.
inline bool communicates(const Step& step) {
  return step.kind == StepKind::kAllGather || step.kind == StepKind::kReduceScatter ||
         step.kind == StepKind::kAllReduce || step.kind == StepKind::kAllToAll;
}

/// The plan from `spec`'s layout to `target`, from a bounded cache of this thread.
RedistributionPlanPtr plan_for(const TensorSpecPtr& spec, LayoutPtr target);
/// Empties that cache.
void clear_plans();

/// Runs a plan on this rank's local tensor of a tensor of global `sizes`. Collective over the
/// groups of its steps. The result may share memory with `local`. A meta tensor moves no data.
/// Below autograd: no gradient.
at::Tensor run_plan(const RedistributionPlan& plan, at::Tensor local, const DeviceMesh& mesh,
                    c10::IntArrayRef sizes);

/// The same, but does not wait for the last collective. Returns nullptr and does nothing for a plan
/// without a collective.
TransferPtr start_plan(RedistributionPlanPtr plan, at::Tensor local, const DeviceMesh& mesh,
                       c10::IntArrayRef sizes);

/// Plans and runs the redistribution of a tensor of `spec` to `target`.
at::Tensor redistribute_local(const at::Tensor& local, const TensorSpecPtr& spec, LayoutPtr target);

/// The local tensor of `tensor`, laid out as `target`. The values are those of the rank at position
/// `source` of the target's mesh; of the other ranks' tensors only sizes and type count. Collective
/// over the mesh: one broadcast of the whole tensor. Below autograd.
at::Tensor scatter_from(const at::Tensor& tensor, int source, const ShardingSpec& target);

}  // namespace tessera::detail
