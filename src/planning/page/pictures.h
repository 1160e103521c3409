// The pictures of a plan's page, as SVG or HTML without script. Colours are classes of
// page_style.h.

#pragma once

#include <optional>
#include <string>

#include "tessera/planning/plan.h"
#include "tessera/planning/search.h"

namespace tessera::planning {

/// A bar for each moment of the step, in its order, of what is live then by purpose; the highest
/// is named.
std::string memory_picture(const RunPlan& plan, const RankPlan& rank);
/// The names of the purposes with their colours.
std::string purpose_legend();

/// Operators, collectives by mesh dimension, and what computation waits for, between two moments in
/// seconds.
std::string timeline_picture(const StepTime& time, double begin, double end);
/// The names of phases, and of waiting, with their colours.
std::string timeline_legend();

/// Each layout's memory over its time, with the frontier as a line.
std::string search_picture(const Search& search);
/// The same as a table.
std::string search_table(const Search& search);

}  // namespace tessera::planning
