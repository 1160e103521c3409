#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::fsdp {

/// How `tensor` lies once it is split on `dim` over the 1-D `mesh`, which becomes the innermost
/// split: a plain tensor on `mesh`; one that tensor parallelism has distributed, on the mesh of
/// both (a slice of their common root). Throws Error, naming the parameter `name`, for a tensor
/// that cannot be split further so.
ShardingSpec sharded_spec(const at::Tensor& tensor, const DeviceMesh& mesh, std::int64_t dim,
                          const std::string& name);

}  // namespace tessera::fsdp
