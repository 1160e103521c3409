#include "use_agreement.h"

#include <algorithm>
#include <cstdint>

namespace tessera::fsdp {
namespace {

void set_where_any_rank_has(std::vector<std::uint8_t>& flags, const DeviceMesh& mesh) {
  if (mesh && mesh.size() > 1) {
    const comm::PurposeScope purpose(mesh.group(), "the parameters in use");
    mesh.group().any_rank(flags);
  }
}

}  // namespace

void UseAgreement::add(const DataMesh& mesh, ShardedParameter& parameter) {
  auto found =
      std::ranges::find_if(peers_, [&](const Peers& peers) { return peers.mesh.all == mesh.all; });
  if (found == peers_.end()) {
    found = peers_.insert(found, {mesh, {}});
  }
  found->parameters.push_back(&parameter);
}

void UseAgreement::settle() {
  for (const Peers& peers : peers_) {
    std::vector<std::uint8_t> used;
    for (const ShardedParameter* parameter : peers.parameters) {
      used.push_back(parameter->used() ? 1 : 0);
    }
    set_where_any_rank_has(used, peers.mesh.shard);
    set_where_any_rank_has(used, peers.mesh.replicate);
    for (std::size_t i = 0; i < used.size(); ++i) {
      peers.parameters[i]->settle_use(used[i] != 0);
    }
  }
}

}  // namespace tessera::fsdp
