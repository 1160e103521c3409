#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tensor_spec.h"
#include "tessera/core/redistribute_plan.h"

namespace tessera::detail {

using PlanPtr = std::shared_ptr<const Plan>;

/// The plan from `spec`'s layout to `target`, from a bounded cache of this thread.
PlanPtr plan_for(const TensorSpecPtr& spec, LayoutPtr target);

/// Runs a plan on this rank's part of a tensor of global `sizes`. Collective over the groups that
/// the plan names. The result may share memory with `local`. A meta tensor moves no data.
/// Below autograd: no gradient.
at::Tensor run_plan(const Plan& plan, at::Tensor local, const DeviceMesh& mesh,
                    c10::IntArrayRef sizes);

/// This rank's part of a tensor of `spec`, brought to `target`.
at::Tensor redistribute_local(const at::Tensor& local, const TensorSpecPtr& spec, LayoutPtr target);

}  // namespace tessera::detail
