#pragma once

#include "examples/llama/train/options/train_options.h"
#include "tessera/comm/world.h"
#include "tessera/core/process.h"

namespace llama {

/// A run of llama_train: trains what the flags say, and writes what they ask for. `signals`: where
/// one comes, the run ends after its step or batch of evaluation, or before the first step, with a
/// checkpoint of what is not saved yet; nullptr: never. False if it ended so. Collective over
/// `world`; a failure on one rank throws there.
bool train(const TrainOptions& options, const tessera::comm::WorldPtr& world,
           const tessera::StopSignals* signals = nullptr);

}  // namespace llama
