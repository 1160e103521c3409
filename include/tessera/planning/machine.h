#pragma once

#include <string>

#include "tessera/export.h"
#include "tessera/planning/detail/machine.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// Returns the machine with a known name (a100, h100, h200, b200, l40s or mi300x) or from a TOML
/// file. The file's key `like` names a machine with default values. `asked`: the option's name, for
/// messages. Throws Error for an unknown name or key, and for missing or invalid numbers.
Machine machine_of(const std::string& name, const std::string& asked = "machine");

}  // namespace tessera::planning
TESSERA_API_END
