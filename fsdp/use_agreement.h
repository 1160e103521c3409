#pragma once

#include <utility>
#include <vector>

#include "data_mesh.h"
#include "sharded_parameter.h"
#include "tessera/comm/communicator.h"

namespace tessera::fsdp {

/// Lets ranks say which parameters they used: what no rank used gets no gradient, though zeros were
/// reduced for it. One exchange a group, whatever the number of parameters.
class UseAgreement {
 public:
  /// `parameter`, of a unit on `mesh`, has been given all of its gradient. Must outlive this.
  void add(const DataMesh& mesh, ShardedParameter& parameter);
  /// Collective over the meshes. Throws PeerError.
  void settle();

 private:
  /// Parameters that the same ranks share.
  struct Peers {
    DataMesh mesh;
    std::vector<ShardedParameter*> parameters;
  };

  std::vector<Peers> peers_;  ///< in the order in which they came, which is that of the modules
};

}  // namespace tessera::fsdp
