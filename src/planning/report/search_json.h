#pragma once

#include <nlohmann/json.hpp>

#include "tessera/planning/search.h"

namespace tessera::planning {

/// As to_json() of a plan has it under `search`.
nlohmann::ordered_json json_of(const Search& search);

}  // namespace tessera::planning
