#pragma once

#include <string>
#include <vector>

#include "host/host.h"
#include "tessera/comm/world.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"
#include "watch/world_watch.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// A rank that has arrived at the rendezvous.
struct Arrival {
  std::string host;  ///< host_identity() of the rank
  RecordPtr record;  ///< the rank's flight record; nullptr on another host
};

/// Announces this rank and waits for all other ranks; element r of the result describes rank r. One
/// rank of each node prints the names of missing ranks. Throws Error with the ranks that do not
/// arrive within the time-out, and PeerError for a rank that has arrived and then ended.
std::vector<Arrival> await_all_ranks(detail::Store& store, const JobVariables& job,
                                     const WorldOptions& options, const RecordPtr& own);

/// Whether a report about a wait is due after waiting for the time `waited`: the first report after
/// at most 3 s, further reports each time that the watchdog's limit has passed again. `said` counts
/// the reports.
bool notice_is_due(std::chrono::milliseconds waited, const WorldOptions& options, int& said);

/// The text of a report on the wait: "tessera: rank 0 waits for node 1 of 2 (ranks 2-3) at
/// HOST:PORT, as RANK and WORLD_SIZE of tessera-run or torchrun say". If `missing` is empty, the
/// text says "for the store".
std::string waiting_text(const JobVariables& job, const std::vector<int>& missing);

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
