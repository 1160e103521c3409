#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/planning/detail/search.h"
#include "tessera/planning/plan.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// Returns a plan as JSON over several lines; values that need a machine are null without one. The
/// object has the fields of the run, of the rank with the highest peak, `kinds` (each RankKind)
/// and, if passed, `search`.
std::string to_json(const RunPlan& plan, const std::optional<Search>& search = std::nullopt);
/// Returns a plan as text: tables, and advice if the run does not fit into memory.
std::string to_text(const RunPlan& plan);
/// Returns a search as a table with one row per estimated layout; `*` marks FoundLayout::frontier.
/// The refused layouts follow, with the reason.
std::string to_text(const Search& search);

}  // namespace tessera::planning
TESSERA_API_END
