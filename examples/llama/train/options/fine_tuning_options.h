// The flags that say which parameters are trained, and what is kept of them.

#pragma once

#include "examples/llama/train/options/train_options.h"

namespace CLI {
class App;
}

namespace llama {

void declare_fine_tuning(CLI::App& app, TrainOptions& options);

/// Those that are for some runs only.
std::vector<FlagUse> uses_of_fine_tuning_flags(const TrainOptions& options);
/// Throws tessera::Error for flags that contradict each other, or would change nothing.
void check_fine_tuning(const CLI::App& app, const TrainOptions& options);

}  // namespace llama
