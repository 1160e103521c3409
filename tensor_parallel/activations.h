#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tessera/core/placement.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::tensor_parallel {

/// `tensor` as a distributed tensor that lies as `wanted` on the 1-D `mesh`. A plain tensor is
/// taken to lie as `given`, with global sizes `sizes` (default: even shards). Collective if data
/// must move; differentiable. Throws Error if `tensor` is on another mesh or no tensor at all.
at::Tensor enter(const at::Tensor& tensor, const DeviceMesh& mesh, const Placement& given,
                 const Placement& wanted, std::optional<std::vector<std::int64_t>> sizes = {});

/// The distributed `tensor` redistributed to `wanted`; as a plain local tensor if `local`.
/// Collective if data must move; differentiable.
at::Tensor leave(const at::Tensor& tensor, const Placement& wanted, bool local);

}  // namespace tessera::tensor_parallel
