#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <memory>

#include "rank/rank.h"
#include "tensor/tensor_spec.h"
#include "tessera/core/detail/layout.h"
#include "tessera/core/detail/redistribute_plan.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {

// Functions that plan and run the redistribution of local tensors.

using RedistributionPlanPtr = std::shared_ptr<const RedistributionPlan>;

/// Returns the plan to redistribute from `spec`'s layout to `target`, from this thread's cache.
RedistributionPlanPtr plan_for(const TensorSpecPtr& spec, LayoutPtr target);
/// Removes all plans from this thread's cache of redistribution plans.
void clear_plans();

/// Runs a redistribution plan on this rank's local tensor of a tensor with global `sizes`.
/// Collective over the process groups of the plan's steps. The result may share memory with
/// `local`. With a meta tensor no data is moved. Runs below autograd, so no gradient is recorded.
at::Tensor run_plan(const RedistributionPlan& plan, at::Tensor local, const DeviceMesh& mesh,
                    c10::IntArrayRef sizes);

/// Like run_plan(), but does not wait for the last collective. A plan without a collective is not
/// run; the result is then nullptr.
TransferPtr start_plan(RedistributionPlanPtr plan, at::Tensor local, const DeviceMesh& mesh,
                       c10::IntArrayRef sizes);

/// Plans and runs the redistribution of a distributed tensor with `spec` to `target`.
at::Tensor redistribute_local(const at::Tensor& local, const TensorSpecPtr& spec, LayoutPtr target);

/// Scatters `tensor` with the layout of `target`, and returns this rank's local tensor. `source` is
/// the position in the target's mesh of the rank whose values are scattered; other ranks' tensors
/// give only sizes and type. Collective over the mesh: one broadcast of the whole tensor. Runs
/// below autograd.
at::Tensor scatter_from(const at::Tensor& tensor, int source, const ShardingSpec& target);

}  // namespace tessera::detail
