#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::fsdp {

/// A second, larger shard of gathered memory that a few neighbouring ranks keep between forward and
/// backward, so that backward gathers among them alone (ZeRO++'s hpZ). It knows nothing of
/// parameters: the memory is cut into equal pieces.
class NeighbourShard {
 public:
  /// `count` neighbours; must divide the size of the 1-D `mesh`. 1: keeps nothing.
  NeighbourShard(const DeviceMesh& mesh, std::int64_t count);

  std::int64_t count() const { return count_; }
  bool kept() const { return piece_.defined(); }
  /// Copies this rank's piece of `memory`, whose length `count` divides.
  void keep(const at::Tensor& memory);
  /// Starts to put the pieces together in `memory`, for the unit that messages call `label`, and
  /// forgets this one. Collective over the neighbours.
  comm::WorkPtr start_gather(const at::Tensor& memory, const std::string& label);
  void drop() { piece_.reset(); }
  /// Of the neighbours. Made at the first use: collective over them.
  comm::Communicator& group();

 private:
  DeviceMesh mesh_;
  std::int64_t count_;
  comm::CommunicatorPtr group_;
  at::Tensor piece_;
  at::Tensor sent_;  ///< until the collective has read it
};

}  // namespace tessera::fsdp
