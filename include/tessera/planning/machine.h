#pragma once

#include <string>

#include "tessera/export.h"
#include "tessera/planning/detail/machine.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// Returns a machine. `name`: a known machine (a100, h100, h200, b200, l40s or mi300x), or the path
/// of a TOML file with the fields of Machine. In a file, the key `like` names a known machine that
/// gives default values: like = "h200". `asked`: the command-line option for `name`, for messages.
/// Throws Error for an unknown name or key, and for a number that is missing or not positive.
Machine machine_of(const std::string& name, const std::string& asked = "machine");

}  // namespace tessera::planning
TESSERA_API_END
