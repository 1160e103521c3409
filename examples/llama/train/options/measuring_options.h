#pragma once

#include <vector>

#include "examples/llama/resolved_flags.h"
#include "examples/llama/train/options/train_options.h"

namespace llama {

/// The flags that say how a run is measured; see --help.
void declare_measuring(CLI::App& app, TrainOptions& options);

/// Fills in the outputs that have no place of their own, and go into --output-dir: those, and the
/// folder itself, are not for another run.
std::vector<LeftOut> place_outputs(const CLI::App& app, TrainOptions& options);

/// What these flags and others say about one another. Throws tessera::Error.
void check_measuring(const TrainOptions& options);

}  // namespace llama
