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

/// Runs a redistribution plan on `local`, the shard of a tensor with global `sizes`. Collective
/// over the process groups of the steps. The result may share memory with `local`. Records no
/// gradient.
at::Tensor run_plan(const RedistributionPlan& plan, at::Tensor local, const DeviceMesh& mesh,
                    c10::IntArrayRef sizes);

/// Starts a redistribution plan like run_plan(), but does not wait for the last collective of the
/// plan. Returns nullptr, and runs nothing, if the plan has no collective.
TransferPtr start_plan(RedistributionPlanPtr plan, at::Tensor local, const DeviceMesh& mesh,
                       c10::IntArrayRef sizes, bool source_unchanged);

at::Tensor redistribute_local(const at::Tensor& local, const TensorSpecPtr& spec, LayoutPtr target);

/// Scatters `tensor` of the rank with index `source` in the mesh. Returns this rank's shard for
/// `target`. Other ranks need only the sizes and dtype of `tensor`. Collective: a broadcast of the
/// whole tensor. Records no gradient.
at::Tensor scatter_from(const at::Tensor& tensor, int source, const ShardingSpec& target);

}  // namespace tessera::detail
