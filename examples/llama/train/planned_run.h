// The run of llama_train as the library plans it.

#pragma once

#include "examples/llama/models.h"
#include "examples/llama/train/options/train_options.h"
#include "tessera/comm/world.h"
#include "tessera/planning/plan.h"

namespace llama {

/// The run of `options` in a comm::fake_world of its ranks, or in a world of this CPU. It reads the
/// model's configuration, and no other file; it writes none. Throws tessera::Error for what
/// llama_train refuses.
tessera::planning::Run planned_run(const TrainOptions& options,
                                   const tessera::comm::WorldPtr& world);

}  // namespace llama
