// What --print-plan prints: a step of the run, computed with shapes alone.

#pragma once

#include "examples/llama/train/options.h"
#include "tessera/comm/world.h"

namespace llama {

/// Prints, on rank 0 of `world`, what the ranks of the run's mesh hold and send: `world` need not
/// be as large as that. Nothing is allocated or sent. Throws tessera::Error for flags that make no
/// mesh, or a model that cannot be split over it.
void print_plan(const TrainOptions& options, const tessera::comm::World& world);

}  // namespace llama
