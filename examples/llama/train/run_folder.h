#pragma once

#include "examples/llama/train/options/train_options.h"

namespace llama {

/// Takes the folder of --output-dir for this run, and leaves its resolved flags there: config.toml,
/// or config-2.toml and so on where the run is resumed. Throws tessera::Error where the folder has
/// another run, also one that begins at the same time, and where it can't be written. For rank 0.
void take_run_folder(const TrainOptions& options);

}  // namespace llama
