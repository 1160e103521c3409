#pragma once

#include <ATen/core/Tensor.h>

#include "tensor_spec.h"

namespace tessera::detail {

/// This rank's part of a tensor of `spec` on another mesh, as DistributedTensor::redistribute says.
/// Collective over the larger mesh, unless every rank has what it needs. Below autograd.
at::Tensor move_to_mesh(const at::Tensor& local, const TensorSpecPtr& spec,
                        const ShardingSpec& target);

/// This rank's part of `tensor`, which the rank at position `source` of the target's mesh has; of
/// the others' tensors only sizes and type count. Collective over the mesh. Below autograd.
at::Tensor scatter_from(const at::Tensor& tensor, int source, const ShardingSpec& target);

}  // namespace tessera::detail
