#pragma once

#include <cstdint>
#include <string>

#include "examples/llama/train/options/train_options.h"

namespace llama {

/// Steps, as the metrics count them, both included.
struct StepRange {
  std::int64_t first = 0, last = 0;
};
/// The steps of "A:B". Throws tessera::Error for other text.
StepRange parse_step_range(const std::string& text);

}  // namespace llama
