#pragma once

#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::fsdp {

/// What an error about ranks that call different collectives ends with.
constexpr auto kHintOfUnusedUnits =
    "; a unit that only some ranks run needs Options::may_be_unused";

/// Lets the ranks of each group agree on their calls: each group once, those that shard before
/// those that replicate, small before large, so that later groups are told of what was found in
/// earlier ones. Then throws the first Error; PeerError at once. Collective over all of the groups,
/// which are to be listed in the same order on all ranks.
void agree_on_calls(const std::vector<comm::Communicator*>& sharding,
                    const std::vector<comm::Communicator*>& replicating);

}  // namespace tessera::fsdp
