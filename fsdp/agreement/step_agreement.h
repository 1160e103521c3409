#pragma once

#include <vector>

#include "comm/data_mesh.h"
#include "parameter_group/parameter_group.h"
#include "state/settings.h"
#include "tessera/comm/communicator.h"

namespace tessera::fsdp {

// What ranks exchange in a step: which collectives they called, whose gathered values are current,
// and which parameters they used. All between the hosts: no tensor is sent and no GPU waited for.

/// Lets the ranks of each group agree on their calls: each group once, those that shard before
/// those that replicate, small before large, so that later groups learn what earlier ones found.
/// Then throws the first Error; PeerError at once. Collective over all of the groups, which must be
/// listed in the same order on all ranks. `settings`: of the root, for its hint.
void agree_on_calls(const std::vector<comm::Communicator*>& sharding,
                    const std::vector<comm::Communicator*>& replicating, const Settings& settings);

/// Frees what a group has gathered, or its piece (see GatheredState::keeps_pieces), on all ranks
/// where one of them has none, or has written to its shards since: all gather from the same ranks.
/// `groups` are the same on all ranks. Collective over their meshes. Throws PeerError.
void free_outdated(std::vector<ParameterGroup*> groups, CommContext& context);

/// The ranks agree on which parameters were used: one that no rank used gets no gradient, although
/// zeros were reduced for it. Also, once a parameter, on how gradients came under tensor
/// parallelism (PendingSum). One exchange a group, whatever the number of parameters.
class UseAgreement {
 public:
  /// The parameters of `group` whose gradients were handed out since their use was settled. They
  /// must outlive this.
  void add(ParameterGroup& group);
  /// Collective over the meshes. Throws PeerError.
  void settle();

 private:
  /// Parameters that the same ranks share.
  struct Peers {
    DataMesh mesh;
    std::vector<ShardedParameter*> parameters;
  };

  void add(const DataMesh& mesh, ShardedParameter* parameter);

  std::vector<Peers> peers_;  ///< in the order in which they came, which is that of the modules
};

}  // namespace tessera::fsdp
