#pragma once

#include "save/prepare_save.h"
#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// Writes what was prepared, and commits it. Collective over `hosts`, which it may use on a thread
/// of its own. Throws Error as save() does, and PeerError.
void save_step(comm::Communicator& hosts, PreparedSave save);

}  // namespace tessera::checkpoint
