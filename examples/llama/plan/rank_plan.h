// What a rank of a run that is not made holds and takes in a step.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "examples/llama/plan/machine.h"
#include "examples/llama/plan/schedule.h"
#include "examples/llama/train/options/train_options.h"
#include "examples/llama/train/planned_run.h"
#include "tessera/observe/memory_log.h"
#include "tessera/observe/metrics.h"

namespace llama {

/// What a rank of one kind has in a step, and does.
struct RankPlan {
  RankKind kind{};
  std::vector<std::int64_t> coordinate{};  ///< of the first rank in the mesh
  tessera::observe::StepMemory memory{};
  std::optional<StepTime> time{};  ///< on a machine
  /// comm, and with a machine also step_time_s, tokens_per_s, tflops and mfu.
  tessera::observe::StepMetrics metrics{};
};

/// A plan of one rank. `kinds`: where to say which kinds of ranks the run has. The rest as of
/// plan_run().
RankPlan plan_rank(const TrainOptions& options, const std::optional<Machine>& machine, int rank,
                   std::vector<RankKind>* kinds = nullptr);
/// Of metrics with a step's time, what follows from that: tokens_per_s, tflops and mfu.
void set_speed(tessera::observe::StepMetrics& metrics, const TrainOptions& options,
               const Machine& machine, const Config& config);
/// A plan of each kind of rank, by the first rank. `machine`: where a step's time is asked for.
/// Throws tessera::Error for what llama_train refuses.
std::vector<RankPlan> plan_run(const TrainOptions& options, const std::optional<Machine>& machine);

}  // namespace llama
