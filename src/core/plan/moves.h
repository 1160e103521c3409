// The steps among which the planner's search chooses.
#pragma once

#include <vector>

#include "plan/search_state.h"
#include "tessera/core/redistribute_plan.h"

namespace tessera::plan {

/// Adds to `out` each step that may be taken from `state`, of every kind; Step::bytes is left to
/// the caller. A new kind of step is a function in moves.cpp and a line in its table.
void propose_steps(const SearchState& state, std::vector<Step>& out);

}  // namespace tessera::plan
