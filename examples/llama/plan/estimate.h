// What a rank of a run takes, from plans of the same model with few layers.

#pragma once

#include <cstdint>
#include <string>

#include "examples/llama/plan/machine.h"
#include "examples/llama/train/options/train_options.h"
#include "tessera/observe/metrics.h"

namespace llama {

/// Of the first rank, whose shards are the largest.
struct Estimate {
  std::int64_t peak_bytes = 0;
  std::string peak_moment;
  double exposed_s = 0;  ///< how long computation waits for collectives
  /// With step_time_s, tokens_per_s, tflops and mfu.
  tessera::observe::StepMetrics metrics;
};

/// Without planning all layers, which are equal: the highest use of memory while a unit is under
/// way, and the time, grow by the same with each layer. So they follow from two plans of few
/// layers; of a small model, and where --freeze tells layers apart, it is a plan of the whole.
/// Throws tessera::Error for what llama_train refuses.
Estimate estimate_rank(const TrainOptions& options, const Machine& machine);

}  // namespace llama
