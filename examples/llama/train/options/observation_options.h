// The flags that say what a run records of its steps beside the metrics.

#pragma once

#include <cstdint>
#include <string>

#include "examples/llama/train/options/train_options.h"

namespace CLI {
class App;
}

namespace llama {

void declare_observation(CLI::App& app, TrainOptions& options);
/// Throws tessera::Error for flags that contradict each other, or would change nothing.
void check_observation(const TrainOptions& options);

/// Steps, as the metrics count them, both included.
struct StepRange {
  std::int64_t first = 0, last = 0;
};
/// Of "A:B". Throws tessera::Error for other text.
StepRange parse_step_range(const std::string& text);

}  // namespace llama
