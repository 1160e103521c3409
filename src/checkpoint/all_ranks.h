#pragma once

#include <functional>

#include "tessera/comm/communicator.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {
class World;
}

namespace tessera::checkpoint {

/// The group of all ranks. The world may be larger than the meshes of a model: it connects all
/// ranks that save or load with rank 0. Collective at the first call.
comm::CommunicatorPtr all_ranks(comm::World& world);

/// The same between the hosts, for sharded saves only: a save in the background uses it while the
/// program uses all other groups.
comm::CommunicatorPtr hosts_of_saves(comm::World& world);

/// Runs `work`, which must not communicate, on every rank. If it throws on one, all ranks throw an
/// Error with that rank's message, so that none waits for a peer that has failed. Collective over
/// `world`.
void run_or_fail_on_all(comm::World& world, const std::function<void()>& work);
/// The same over a group between hosts.
void run_or_fail_on_all(comm::Communicator& hosts, const std::function<void()>& work);

/// The same for reading the files of a step: all ranks throw DamagedStep if bytes are not those
/// that were written, or a file is not there for rank 0 either. A file that could not be read
/// proves nothing: that is an Error.
void read_or_fail_on_all(comm::World& world, const std::function<void()>& work);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
