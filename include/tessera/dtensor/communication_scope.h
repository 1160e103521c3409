#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/trace.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_BEGIN
namespace tessera {

/// A CommunicationScope records this rank's collectives while the scope exists. For each mesh
/// dimension the scope counts calls and bytes. The scope also lists the calls. The bytes of a call
/// are the size of the tensor that this rank passes. The list grows with each call: use a scope for
/// one step. Not collective. Records all threads of this rank; only one thread may use the scope.
/// Like PyTorch's CommDebugMode.
///
///   CommunicationScope communication(mesh);
///   model(x).sum().backward();
///   std::cout << communication.report() << communication.listing();
class CommunicationScope {
 public:
  explicit CommunicationScope(const DeviceMesh& mesh);
  /// Returns the number of calls and of bytes for each pair of a mesh dimension and a collective.
  comm::TrafficTable table() const;
  /// Returns calls and bytes along mesh dimension `mesh_dim`, or of all collectives for "".
  comm::Traffic total(const std::string& mesh_dim = {}) const;
  /// Returns a table as text: calls and bytes for each pair of a mesh dimension and a collective.
  std::string report() const;
  /// Returns every collective call, in the order in which the calls started. Includes calls on
  /// process groups over several mesh dimensions ("dp_tp") and on other meshes of this rank.
  std::vector<comm::CollectiveCall> calls() const;
  /// Returns one line per call: index, mesh dimension, collective, bytes, and the operator or FSDP
  /// unit (in backward also the autograd node).
  std::string listing() const;

 private:
  comm::WorldPtr world_;
  comm::TrafficTable before_;
  std::shared_ptr<comm::CallRecorder> recorder_;
};

}  // namespace tessera
TESSERA_API_END
