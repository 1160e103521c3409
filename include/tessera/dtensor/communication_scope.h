#pragma once

#include <string>
#include <vector>

#include "tessera/comm/trace.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_BEGIN
namespace tessera {

/// Records this rank's collectives during the scope: counts calls and bytes by mesh dimension, and
/// lists the calls. The list grows with every call, so use it for one step, not for a whole
/// training run. Bytes are those of this rank's inputs. Not collective. Records the calls of all
/// threads of this rank; the methods of the scope are for one thread. PyTorch's CommDebugMode, with
/// bytes.
///
///   CommunicationScope communication(mesh);
///   model(x).sum().backward();
///   std::cout << communication.report() << communication.listing();
class CommunicationScope {
 public:
  explicit CommunicationScope(const DeviceMesh& mesh);
  /// Calls and bytes by mesh dimension and collective.
  comm::TrafficTable table() const;
  /// All collectives together, or those of one mesh dimension.
  comm::Traffic total() const;
  comm::Traffic total(const std::string& mesh_dim) const;
  /// A line for each mesh dimension and collective: calls and bytes.
  std::string report() const;
  /// Every call, in the order of the starts. Includes process groups over several mesh dimensions
  /// ("dp_tp") and other meshes of this rank.
  std::vector<comm::CollectiveCall> calls() const { return recorder_.calls(); }
  /// One line for each call: number, mesh dimension, collective, bytes, and purpose (an operator or
  /// an FSDP unit; in backward also the autograd node).
  std::string listing() const;

 private:
  comm::WorldPtr world_;
  comm::TrafficTable before_;
  comm::CallRecorder recorder_;
};

}  // namespace tessera
TESSERA_API_END
