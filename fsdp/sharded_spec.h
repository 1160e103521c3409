#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "data_mesh.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::fsdp {

/// How `tensor` lies once it is split on `dim` over the mesh's sharding dimension, which becomes
/// the innermost split (nullopt: once it is replicated there): a plain tensor on that mesh; one
/// that tensor parallelism has distributed, on the mesh of both (a slice of their common root).
/// Throws Error, naming the parameter `name`, for a tensor that cannot be split further so.
ShardingSpec sharded_spec(const at::Tensor& tensor, const DataMesh& mesh,
                          std::optional<std::int64_t> dim, const std::string& name);

}  // namespace tessera::fsdp
