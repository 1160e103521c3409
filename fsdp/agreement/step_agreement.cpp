// What ranks exchange when a forward begins and ends and when backward ends: a few bytes a group,
// between the hosts. Every rank must make these calls in the same order, also after it has found an
// error: if it left early, its peers would wait for it.

#include "agreement/step_agreement.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>

#include "tessera/core/error.h"

namespace tessera::fsdp {
namespace {

using Groups = std::vector<comm::Communicator*>;

/// Each once, after those that are in `order` already.
void append_by_size(Groups& order, Groups groups) {
  // Stable, so that groups of equal size keep the order of the modules, which all ranks share.
  std::ranges::stable_sort(groups, {}, &comm::Communicator::size);
  for (comm::Communicator* group : groups) {
    if (std::ranges::find(order, group) == order.end()) {
      order.push_back(group);
    }
  }
}

/// Flags become the maximum over the mesh's ranks. A mesh of one rank knows already.
void set_where_any_rank_has(std::vector<std::uint8_t>& flags, const DeviceMesh& mesh,
                            const char* what) {
  if (mesh && mesh.size() > 1) {
    const comm::PurposeScope purpose(mesh.group(), what);
    mesh.group().any_rank(flags);
  }
}

}  // namespace

void agree_on_calls(const Groups& sharding, const Groups& replicating, const Settings& settings) {
  Groups groups;
  append_by_size(groups, sharding);
  append_by_size(groups, replicating);
  std::string found;
  for (comm::Communicator* group : groups) {
    try {
      group->agree_on_calls(found);
    } catch (const comm::PeerError&) {
      // A peer is gone. If a rank has found the cause, that error is thrown instead.
      if (found.empty()) {
        throw;
      }
      break;
    } catch (const Error& error) {
      if (found.empty()) {
        found = error.what();
      }
    }
  }
  TESSERA_CHECK(found.empty(), found, settings.hint_of_unused_units(found));
}

void free_outdated(std::vector<ParameterGroup*> groups, CommContext& context) {
  while (!groups.empty()) {
    const DeviceMesh mesh = groups.front()->mesh().shard;
    // Meshes in the order of the modules' groups, the same on all ranks.
    const auto others = std::stable_partition(
        groups.begin(), groups.end(),
        [&](const ParameterGroup* group) { return group->mesh().shard == mesh; });
    const std::vector<ParameterGroup*> same(groups.begin(), others);
    groups.erase(groups.begin(), others);
    std::vector<std::uint8_t> outdated;
    for (const ParameterGroup* group : same) {
      outdated.push_back(group->gathered().is_current() ? 0 : 1);
    }
    // One exchange for all groups of a mesh.
    set_where_any_rank_has(outdated, mesh, "what is gathered still");
    for (std::size_t i = 0; i < same.size(); ++i) {
      if (outdated[i] != 0) {
        same[i]->gathered().reshard(context);
      }
    }
  }
}

void UseAgreement::add(ParameterGroup& group) {
  for (ShardedParameter* parameter : group.gradients().accumulated()) {
    add(group.mesh(), parameter);
  }
}

void UseAgreement::add(const DataMesh& mesh, ShardedParameter* parameter) {
  auto found =
      std::ranges::find_if(peers_, [&](const Peers& peers) { return peers.mesh.all == mesh.all; });
  if (found == peers_.end()) {
    found = peers_.insert(found, {mesh, {}});
  }
  found->parameters.push_back(parameter);
}

void UseAgreement::settle() {
  for (const Peers& peers : peers_) {
    std::vector<std::uint8_t> flags;
    for (ShardedParameter* parameter : peers.parameters) {
      flags.push_back(parameter->used() ? 1 : 0);
      std::ranges::copy(parameter->pending_sum().flags(), std::back_inserter(flags));
    }
    set_where_any_rank_has(flags, peers.mesh.shard, "the parameters in use");
    set_where_any_rank_has(flags, peers.mesh.replicate, "the parameters in use");
    std::span<const std::uint8_t> rest = flags;
    for (ShardedParameter* parameter : peers.parameters) {
      const bool used = rest.front() != 0;
      PendingSum& sum = parameter->pending_sum();
      const std::size_t count = sum.flags().size();
      parameter->settle_use(used);
      // Without a gradient on any rank the next backwards decide.
      if (used && count > 0) {
        sum.agree(rest.subspan(1, count));
      }
      rest = rest.subspan(1 + count);
    }
  }
}

}  // namespace tessera::fsdp
