#pragma once

#include "plan/call_plan.h"

namespace tessera::detail {

/// Runs a call of kind kForeach position by position (see positions_depend). Collective if the plan
/// moves data.
void run_by_position(PlannedCall& call);

}  // namespace tessera::detail
