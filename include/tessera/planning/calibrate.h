#pragma once

#include "tessera/comm/world.h"
#include "tessera/export.h"
#include "tessera/planning/machine.h"
#include "tessera/planning/plan.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// Makes a few steps of a training on this CPU, and returns the machine on which its plan takes as
/// long as the median of them: products, attention and collectives take their own measured time,
/// all other operators the rest of the step. The rates are this rank's, while all ranks of `world`
/// compute. `make`: called with `world` and with a fake one. `options`: those of the plan.
/// Collective over `world`, whose ranks are processes of one host. Throws what `make` and the step
/// throw.
Machine calibrate(const MakeRun& make, const comm::WorldPtr& world, PlanOptions options);

}  // namespace tessera::planning
TESSERA_API_END
