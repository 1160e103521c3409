#pragma once

#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// A group of one rank: every collective is a copy, or nothing.
CommunicatorPtr make_solo_communicator();

/// Rank `rank` of `size` ranks that exist only on paper: this rank's own data stands in every
/// place.
CommunicatorPtr make_loopback_communicator(int rank, int size);

}  // namespace tessera::comm
