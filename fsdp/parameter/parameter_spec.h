#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "comm/data_mesh.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/fsdp/all_gather_extension.h"
#include "tessera/nn/parameter.h"

namespace tessera::fsdp {

/// The memory in which shards and their gradients live.
struct ShardHome {
  c10::Device device;
  bool pinned = false;     ///< page-locked
  bool offloaded = false;  ///< on the host for an offload_policy: the host adds up gradients
};

/// All decisions about a parameter before it is sharded, checked: sharding only applies them.
struct ParameterSpec {
  std::string name;  ///< within the unit
  nn::SlotPtr slot;
  DataMesh mesh;
  std::optional<std::int64_t> dim;  ///< that is split over mesh.shard; empty: replicated there
  std::int64_t parts = 1;           ///< equal ones of that dimension, each split (a fused weight)
  ShardingSpec sharding;            ///< of the persistent tensor
  ShardHome home;
  std::optional<AllGatherExtension> extension;
};

/// How many equal parts dimension `dim` of `tensor` has, if tensor parallelism has split each of
/// them separately: those of a fused weight. 1 for any other tensor.
std::int64_t parts_of(const at::Tensor& tensor, std::optional<std::int64_t> dim);

/// The spec of `tensor` once it is split on `dim` over the mesh's sharding dimension, which becomes
/// the innermost split, of each part (nullopt: once it is replicated there). A plain tensor is then
/// on that mesh; one that tensor parallelism has distributed is on the mesh of both (a slice of
/// their common root). Throws Error, with `name` as the parameter's name, for a tensor that cannot
/// be split further so.
ShardingSpec sharded_spec(const at::Tensor& tensor, const DataMesh& mesh,
                          std::optional<std::int64_t> dim, const std::string& name);

}  // namespace tessera::fsdp
