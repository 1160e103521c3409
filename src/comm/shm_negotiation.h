#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <optional>

#include "group_info.h"
#include "shm_segment.h"

namespace tessera::comm {

/// The steps by which the ranks of a group agree on one segment, or all on none: if a rank cannot
/// reach it, does not recognise its peers' processes (another pid namespace) or has TESSERA_SHM=0.
std::optional<ShmSegment> negotiate_segment(c10d::Store& store, const GroupInfo& group);

}  // namespace tessera::comm
