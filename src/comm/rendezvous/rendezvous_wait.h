#pragma once

#include <string>
#include <vector>

#include "host/host.h"
#include "tessera/comm/world.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"
#include "watch/watch.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// A rank that has announced itself in the job's store.
struct Arrival {
  std::string host;  ///< host_identity() of the rank
  RecordPtr record;  ///< the rank's flight record (log of its calls); nullptr on another machine
};

/// Announces this rank in the store and waits for all other ranks. Element r of the result
/// describes rank r. Throws Error at the time-out, and PeerError if another rank has ended.
std::vector<Arrival> await_all_ranks(detail::Store& store, const JobVariables& job,
                                     const WorldOptions& options, const RecordPtr& own);

/// Prints a line about a long wait, with the store's address and the missing ranks. Only the first
/// rank of each machine prints the line, and only once (`said`).
void say_wait(const JobVariables& job, const WorldOptions& options,
              std::chrono::milliseconds waited, const std::vector<int>& missing, bool& said);

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
