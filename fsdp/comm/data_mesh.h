#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera::fsdp {

/// The mesh that fully_shard was given: one dimension that shards, and maybe one in front of it
/// that replicates (HSDP), or over which persistent tensors are split as well.
struct DataMesh {
  /// Throws Error for a mesh of other than one or two dimensions.
  explicit DataMesh(const DeviceMesh& mesh);
  /// Both dimensions shard, as one. Throws Error for a mesh of other than two.
  static DataMesh sharding_over_replicas(const DeviceMesh& mesh);
  /// The one dimension of `mesh` replicates, and each rank alone shards. Throws Error for a mesh of
  /// other than one dimension.
  static DataMesh replicating(const DeviceMesh& mesh);

  DeviceMesh all;        ///< what was given
  DeviceMesh shard;      ///< one dimension
  DeviceMesh replicate;  ///< no mesh without such a dimension
  /// Set only for shard_over_replicas: this rank's replica group, whose ranks keep gathered
  /// parameters between them.
  DeviceMesh replica;

  std::int64_t replicas() const { return replicate ? replicate.size() : 1; }
  /// How many ranks compute gradients that are averaged.
  std::int64_t ranks() const { return shard.size() * replicas(); }
  /// The mesh of the persistent tensors.
  const DeviceMesh& persistent() const { return replicate ? all : shard; }
  /// The dimensions that have different parts of the batch, the outermost first.
  std::vector<DeviceMesh> data_dims() const;
  /// Where this rank computes.
  c10::Device device() const;

 private:
  DataMesh() = default;
};

/// Whether all ranks of `part` are of `whole`.
bool is_slice(const DeviceMesh& part, const DeviceMesh& whole);

}  // namespace tessera::fsdp
