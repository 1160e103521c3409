#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/observe/metrics.h"
#include "tessera/planning/machine.h"
#include "tessera/planning/plan.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// The memory and time of the first rank of a training, whose shards are the largest.
struct Estimate {
  std::int64_t peak_bytes = 0;
  std::string peak_moment{};
  double exposed_s = 0;  ///< how long computation waits for collectives
  /// With step_time_s, tokens_per_s, tflops and mfu.
  observe::StepMetrics metrics{};
};

/// A model with equal layers in a row.
struct LayeredModel {
  std::int64_t layers = 0;  ///< 0: it has none that are equal
  std::string container{};  ///< FQN of the module that contains them: "model.layers"
};

/// Estimates a training on a machine from two plans of few layers: memory and time grow linearly
/// with equal layers. A model with few or unequal layers is planned as a whole. `plan_of(layers)`:
/// the first rank's plan of the model with that many layers, 0: all. `options`: of the whole model.
Estimate estimate(const std::function<RankPlan(std::int64_t layers)>& plan_of,
                  const LayeredModel& model, std::int64_t ranks, const PlanOptions& options);

/// How a training is split over ranks: the result of a search.
struct TrainingLayout {
  std::int64_t dp = 1;          ///< ranks that shard parameters, without those that replicate them
  std::int64_t tp = 1, cp = 1;  ///< degrees of tensor and context parallelism
  std::string ac{};             ///< activation checkpointing: "none", "selective" or "full"
  int zero = 3;  ///< 2: parameters stay gathered until backward; 3: they are resharded
  std::int64_t accumulate = 1;  ///< micro-batches of a step
};

/// What a search may choose from.
struct SearchSpace {
  std::int64_t ranks = 0;
  Machine machine{};
  std::int64_t dp_replicate = 1;
  std::int64_t batch = 1;     ///< samples in a step, over all ranks
  std::int64_t sequence = 0;  ///< tokens of a sample; 0: samples are no sequences
  TrainingLayout first{};     ///< the fixed values, and where cp and accumulate begin
  bool fixed_dp = false, fixed_tp = false, fixed_cp = false, fixed_ac = false, fixed_zero = false,
       fixed_accumulate = false;
  /// Whether the model can be split over so many ranks; empty: over any number.
  std::function<bool(std::int64_t tp)> allows_tp{};
  std::function<bool(std::int64_t cp)>
      allows_cp{};  ///< the same of its sequences; empty: over none
  /// The first rank's estimate. A layout for which it throws Error is refused.
  std::function<Estimate(const TrainingLayout& layout)> estimate{};
  std::string batch_name = "batch";  ///< for messages
  /// For messages; empty: name_of().
  std::function<std::string(const TrainingLayout& layout)> text{};
};

/// A training layout and what is estimated of it.
struct FoundLayout {
  TrainingLayout layout{};
  Estimate estimate{};
  bool fits = false;
  bool frontier = false;  ///< it fits, and no other takes less memory and no more time
};
/// A training layout that was not estimated.
struct RefusedLayout {
  TrainingLayout layout{};
  std::string reason{};
};

/// What a search has found.
struct Search {
  SearchSpace space{};
  std::vector<FoundLayout> found{};  ///< those that fit first, by time; then the others, by memory
  std::vector<RefusedLayout> refused{};  ///< by the model's or the batch's sizes
  std::int64_t skipped = 0;              ///< that take more memory than one that does not fit

  /// The fastest that fits; where none does, the one that takes the least memory.
  const FoundLayout& best() const { return found.front(); }
  /// Whether some layout splits sequences.
  bool has_cp() const;
  /// Whether some layout takes its batch in parts.
  bool has_accumulation() const;
};

/// "dp 64 × tp 8, ac full, ZeRO-3"; with cp and micro-batches where they are above 1.
std::string name_of(const TrainingLayout& layout);

/// For SearchSpace::estimate: estimates a layout on `ranks` by plans. `run_of(layout, layers)`
/// makes its run with so many layers; 0: all. `options`: of the whole model.
std::function<Estimate(const TrainingLayout& layout)> estimate_by_plans(
    const std::function<MakeRun(const TrainingLayout& layout, std::int64_t layers)>& run_of,
    const LayeredModel& model, std::int64_t ranks, const PlanOptions& options);

/// Estimates layouts: tp within a node, each kind of activation checkpointing, ZeRO-2 and 3. If
/// nothing fits, also more micro-batches. For sequences of 16384 tokens or more, or if still
/// nothing fits, also cp of 2, 4 and 8. Fixed values stay. Throws Error if no layout can be
/// planned.
Search search(const SearchSpace& space);

}  // namespace tessera::planning
TESSERA_API_END
