#pragma once

#include "tessera/comm/world.h"
#include "tessera/export.h"
#include "tessera/planning/machine.h"
#include "tessera/planning/plan.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// Makes some steps of a training on this CPU, and returns a machine with the rates that rank 0's
/// operators and collectives reach in the fastest of them; host_latency_s is what then is left of
/// the step. So the plan of the same training takes as long as it does, and plans of others take
/// what their work does at these rates. `make`: called with `world`, and for the plan with a fake
/// one. `options`: of the plan, without a machine. Collective over `world`, whose ranks are
/// processes of one host; the result is of the calling rank. Throws what `make` and the step throw.
Machine calibrate(const MakeRun& make, const comm::WorldPtr& world, PlanOptions options);

}  // namespace tessera::planning
TESSERA_API_END
