#pragma once

#include <vector>

#include "parameter_group.h"

namespace tessera::fsdp {

/// Drops the piece of a group (see ParameterGroup::keeps_pieces) on all ranks where one of them has
/// none, or has written to its shards since: all gather from the same ranks. `groups` are the same
/// on all ranks. Collective over their meshes. Throws PeerError.
void drop_invalid_pieces(std::vector<ParameterGroup*> groups);

}  // namespace tessera::fsdp
