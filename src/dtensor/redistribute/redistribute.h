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

using RedistributionPlanPtr = std::shared_ptr<const RedistributionPlan>;

/// Returns the plan for a redistribution from `spec` to the layout `target`. Cached per thread.
RedistributionPlanPtr plan_for(const TensorSpecPtr& spec, LayoutPtr target);
void clear_plans();

/// Runs a redistribution plan on `local`, this rank's local tensor of a tensor with global `sizes`.
/// Collective over the process groups of the plan's steps. The result may share memory with
/// `local`. With a meta tensor no data is moved. Runs below autograd, so no gradient is recorded.
at::Tensor run_plan(const RedistributionPlan& plan, at::Tensor local, const DeviceMesh& mesh,
                    c10::IntArrayRef sizes);

/// Starts a redistribution plan like run_plan(), but does not wait for the last collective of the
/// plan. Returns nullptr, and runs nothing, if the plan has no collective.
TransferPtr start_plan(RedistributionPlanPtr plan, at::Tensor local, const DeviceMesh& mesh,
                       c10::IntArrayRef sizes);

at::Tensor redistribute_local(const at::Tensor& local, const TensorSpecPtr& spec, LayoutPtr target);

/// Scatters `tensor` of the rank with index `source` in the mesh, and returns this rank's shard for
/// `target`. On other ranks, only the sizes and the dtype of `tensor` are used. Collective: a
/// broadcast of the whole tensor. Runs below autograd.
at::Tensor scatter_from(const at::Tensor& tensor, int source, const ShardingSpec& target);

}  // namespace tessera::detail
