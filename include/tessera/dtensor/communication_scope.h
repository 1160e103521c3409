#pragma once

#include <string>

#include "tessera/comm/trace.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

/// Counts this rank's collectives, calls and bytes by mesh dimension, from its construction on.
/// PyTorch's CommDebugMode, with bytes.
///
///   CommunicationScope communication(mesh);
///   model(x).sum().backward();
///   std::cout << communication.report();
class CommunicationScope {
 public:
  explicit CommunicationScope(const DeviceMesh& mesh);
  comm::TrafficTable table() const;
  /// All collectives together, or those of one mesh dimension.
  comm::Traffic total() const;
  comm::Traffic total(const std::string& mesh_dim) const;
  /// A line for each mesh dimension and collective: calls and bytes.
  std::string report() const;

 private:
  comm::WorldPtr world_;
  comm::TrafficTable before_;
};

}  // namespace tessera
