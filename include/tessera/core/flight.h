#pragma once

#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::flight {

// For launchers of ranks: the records that a job's ranks keep of their collectives.

/// "rank 1" or "ranks 0, 2-7".
std::string name_ranks(const std::vector<int>& ranks);

/// Which rank left the order of collectives that the ranks have in common, and what each rank did
/// last, line by line, from the flight records in `folder`. Throws Error if it holds none.
std::vector<std::string> explain_records(const std::string& folder);

}  // namespace tessera::flight
TESSERA_API_END
