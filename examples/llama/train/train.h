#pragma once

#include "examples/llama/train/options/train_options.h"
#include "tessera/comm/world.h"
#include "tessera/core/stop_signals.h"

namespace llama {

/// A run of llama_train: trains what the flags say, and writes what they ask for. `signals`: end it
/// after its step where they come, or before the first; nullptr: none does. False if it was told to
/// stop and has saved a checkpoint. Collective over `world`; a failure on one rank throws there.
bool train(const TrainOptions& options, const tessera::comm::WorldPtr& world,
           const tessera::StopSignals* signals = nullptr);

}  // namespace llama
