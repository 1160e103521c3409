#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "tessera/mesh/device_mesh.h"

namespace tessera::fsdp {

/// The mesh that fully_shard was given: one dimension that shards, and maybe one in front of it
/// that replicates (HSDP).
struct DataMesh {
  /// Throws Error for a mesh of other than one or two dimensions.
  explicit DataMesh(const DeviceMesh& mesh);
  /// The one dimension of `mesh` replicates, and each rank alone shards. Throws Error for a mesh of
  /// other than one dimension.
  static DataMesh replicating(const DeviceMesh& mesh);

  DeviceMesh all;  ///< what was given
  DeviceMesh shard;
  DeviceMesh replicate;  ///< no mesh without such a dimension

  std::int64_t replicas() const { return replicate ? replicate.size() : 1; }
  /// How many ranks compute gradients that are averaged.
  std::int64_t ranks() const { return shard.size() * replicas(); }
  /// Where this rank computes.
  c10::Device device() const;

 private:
  DataMesh() = default;
};

}  // namespace tessera::fsdp
