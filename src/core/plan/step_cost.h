#pragma once

#include <cstdint>

#include "place.h"
#include "tessera/core/redistribute_plan.h"

namespace tessera::plan {

/// What one rank sends at most in `step` (Step::bytes), from the largest local tensor.
std::int64_t step_bytes(const Problem& problem, const Step& step);
/// Whether ranks talk in it.
bool is_collective(StepKind kind);
/// Microseconds of `step`, whose bytes are set.
double step_cost(const CostModel& model, const Step& step);
/// No more than the cost of getting from `place` to the target.
double least_cost(const CostModel& model, const Place& place);

}  // namespace tessera::plan
