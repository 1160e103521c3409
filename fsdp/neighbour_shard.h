#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>

#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::fsdp {

/// A second, larger shard of gathered memory that a few neighbouring ranks keep while the memory is
/// freed, so that it is gathered again among them alone (ZeRO++'s hpZ). It knows nothing of
/// parameters: the memory is cut into equal pieces.
class NeighbourShard {
 public:
  /// `neighbours`: a 1-D mesh, or none, to keep nothing.
  explicit NeighbourShard(DeviceMesh neighbours) : mesh_(std::move(neighbours)) {}

  bool enabled() const { return static_cast<bool>(mesh_); }
  /// Of how many pieces the memory consists.
  std::int64_t count() const { return mesh_ ? mesh_.size() : 1; }
  bool kept() const { return piece_.defined(); }
  /// Copies this rank's piece of `memory`, whose length count() divides.
  void keep(const at::Tensor& memory);
  /// Starts to put the pieces together in `memory`, for the unit that messages call `label`.
  /// Collective over the neighbours.
  comm::WorkPtr start_gather(const at::Tensor& memory, const std::string& label);
  /// That has ended, and the lane that freed memory goes back to has waited for it.
  void end_gather() { sent_.reset(); }
  void drop() { piece_.reset(); }
  /// Of the neighbours. Made at the first use: collective over them.
  comm::Communicator& group() { return mesh_.group(); }

 private:
  DeviceMesh mesh_;
  at::Tensor piece_;
  at::Tensor sent_;  ///< while the collective reads it
};

}  // namespace tessera::fsdp
