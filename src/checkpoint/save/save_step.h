#pragma once

#include "save/prepare_save.h"
#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// Writes the prepared save, and commits it. Collective over `hosts`; may run on a separate thread.
/// Throws Error as save() does, and PeerError.
void save_step(comm::Communicator& hosts, PreparedSave save);

}  // namespace tessera::checkpoint
