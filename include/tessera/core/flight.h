#pragma once

#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::flight {

// Reads flight records, in which the ranks of a job store their collectives. For launchers of
// ranks.

/// Ranks as text: "rank 1" or "ranks 0, 2-7".
std::string name_ranks(const std::vector<int>& ranks);

/// Explains a hang from the flight records in `folder`, line by line: which rank left the common
/// order of collectives, and what each rank did last. Throws Error if the folder contains no
/// records.
std::vector<std::string> explain_records(const std::string& folder);

}  // namespace tessera::flight
TESSERA_API_END
