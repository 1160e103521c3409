#pragma once

#include <string>
#include <vector>

#include "tessera/comm/trace.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

/// Counts this rank's collectives, calls and bytes by mesh dimension, and lists them one by one,
/// from its construction on. PyTorch's CommDebugMode, with bytes. The list grows with every call:
/// look at one step, not at a training.
///
///   CommunicationScope communication(mesh);
///   model(x).sum().backward();
///   std::cout << communication.report() << communication.listing();
class CommunicationScope {
 public:
  explicit CommunicationScope(const DeviceMesh& mesh);
  comm::TrafficTable table() const;
  /// All collectives together, or those of one mesh dimension.
  comm::Traffic total() const;
  comm::Traffic total(const std::string& mesh_dim) const;
  /// A line for each mesh dimension and collective: calls and bytes.
  std::string report() const;
  /// Every call, in the order of their starts: also of groups over several mesh dimensions
  /// ("dp_tp"), and of other meshes of this rank.
  std::vector<comm::CollectiveCall> calls() const { return recorder_.calls(); }
  /// A line for each call: its number, mesh dimension, collective, bytes, and what it is for (an
  /// operator, a unit of FSDP; in a backward pass with the node of autograd).
  std::string listing() const;

 private:
  comm::WorldPtr world_;
  comm::TrafficTable before_;
  comm::CallRecorder recorder_;
};

}  // namespace tessera
