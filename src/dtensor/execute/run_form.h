#pragma once

#include "plan/call_plan.h"

namespace tessera::detail {

/// Runs the form of the call's plan.
void run_form(PlannedCall& call);

}  // namespace tessera::detail
