#pragma once

#include "examples/llama/train/options/train_options.h"

namespace llama {

/// Takes the folder of --output-dir for this run, and leaves its resolved flags there: config.toml,
/// or config-2.toml and so on where the run is resumed. `goes_on`: whether a step was loaded; a run
/// of --resume auto that ended before its first one begins again with the same flags. Throws
/// tessera::Error where the folder has another run, also one that begins at the same time, and
/// where it can't be written. For rank 0.
void take_run_folder(const TrainOptions& options, bool goes_on);

}  // namespace llama
