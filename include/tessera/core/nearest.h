#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// The candidate with the fewest edits (Levenshtein distance) from `word`, for a message about a
/// name that is not known. Of several equally near the first one; "" only where there are none.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace tessera
TESSERA_API_END
