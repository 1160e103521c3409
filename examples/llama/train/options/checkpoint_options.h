// The flags that say what a run starts from, and what it leaves to be continued.

#pragma once

#include "examples/llama/train/options/train_options.h"

namespace CLI {
class App;
}

namespace llama {

void declare_checkpoints(CLI::App& app, TrainOptions& options);
/// Throws tessera::Error for flags that contradict each other, or would change nothing.
void check_checkpoints(const TrainOptions& options);

}  // namespace llama
