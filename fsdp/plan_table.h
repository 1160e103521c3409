#pragma once

#include <string>

#include "tessera/fsdp/policy.h"

namespace tessera::fsdp {

/// A unit's line in the table of a plan: everything but what its parameters' names and the options
/// that are functions say.
std::string line_of(const PlannedUnit& unit);

}  // namespace tessera::fsdp
