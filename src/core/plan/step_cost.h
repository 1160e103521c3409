// The costs by which the planner's search ranks steps and layouts.
#pragma once

#include <cstdint>

#include "plan/search_state.h"
#include "tessera/core/redistribute_plan.h"

namespace tessera::plan {

/// The most bytes that one rank sends in `step` (Step::bytes): computed for the coordinate with the
/// largest local tensor.
std::int64_t step_bytes(const Problem& problem, const Step& step);
/// Whether steps of this kind communicate.
bool is_collective(StepKind kind);
/// Microseconds that `step` takes. Step::bytes must be set.
double step_cost(const CostModel& model, const Step& step);
/// A lower bound of the cost from `state` to the target: the heuristic of the search, admissible.
double least_cost(const CostModel& model, const SearchState& state);

}  // namespace tessera::plan
