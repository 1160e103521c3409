// Which ranks of a run have equal sizes of everything, told from one of them.
#pragma once

#include <vector>

#include "tessera/planning/plan.h"

namespace tessera::planning {

/// By the sizes of ranks' shards, and by Run::sizes; in the order of their first ranks.
std::vector<RankKind> kinds_of(const Run& run);

}  // namespace tessera::planning
