#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/observe/metrics.h"
#include "tessera/planning/machine.h"
#include "tessera/planning/plan.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// The memory and time of the first rank of a training run. The first rank has the largest shards.
struct Estimate {
  std::int64_t peak_bytes = 0;
  std::string peak_moment{};
  double exposed_s = 0;  ///< seconds in which the compute stream waits for collectives
  /// The metrics step_time_s, tokens_per_s, tflops and mfu. Other fields are not set.
  observe::StepMetrics metrics{};
};

/// How a training run is split over ranks.
struct TrainingLayout {
  std::int64_t dp = 1;          ///< number of data-parallel ranks that shard parameters
  std::int64_t tp = 1, cp = 1;  ///< numbers of tensor- and context-parallel ranks
  /// Activation checkpointing: "none", "selective" or "full"; "selective:12" is "selective" for the
  /// first 12 blocks only.
  std::string ac{};
  int zero = 3;                 ///< ZeRO stage: 3, or 2 (parameters stay gathered until backward)
  std::int64_t accumulate = 1;  ///< number of micro-batches per step
};

/// The input of search(): the training run, and the values that the search can choose.
struct SearchSpace {
  std::int64_t ranks = 0;
  Machine machine{};
  std::int64_t dp_replicate = 1;
  std::int64_t batch = 1;     ///< number of samples per step, over all ranks
  std::int64_t sequence = 0;  ///< number of tokens per sample; 0: samples are not sequences
  std::int64_t blocks = 0;    ///< number of equal blocks; 0: checkpoints all blocks or none
  TrainingLayout first{};     ///< values of the `fixed` fields; the first cp and accumulate to try
  /// The fields of `first` that the search must not change, by name: "dp", "tp", "cp", "ac",
  /// "zero", "accumulate".
  std::set<std::string> fixed{};
  /// Whether the model can be split over `tp` ranks. If the function is empty, any number of ranks
  /// is possible.
  std::function<bool(std::int64_t tp)> allows_tp{};
  std::function<bool(std::int64_t cp)>
      allows_cp{};  ///< whether sequences can be split over `cp` ranks; empty: never
  /// Returns the estimated memory and time of the first rank in a layout. If the function throws
  /// Error, search() refuses the layout.
  std::function<Estimate(const TrainingLayout& layout)> estimate{};
};

/// A training layout and its estimate.
struct FoundLayout {
  TrainingLayout layout{};
  Estimate estimate{};
  bool fits = false;
  /// Whether the layout fits into memory and is Pareto-optimal in time and memory.
  bool frontier = false;
};

/// The result of search().
struct Search {
  SearchSpace space{};
  /// Layouts that fit into memory, sorted by time; then all other layouts, sorted by memory use.
  std::vector<FoundLayout> found{};
  /// The refused layouts and the reasons, for example a size of the model that tp does not divide.
  std::vector<std::pair<TrainingLayout, std::string>> refused{};
  std::int64_t skipped = 0;  ///< number of layouts skipped: layouts with less memory do not fit

  /// Returns the fastest layout that fits or, if no layout fits, the layout with the least memory.
  const FoundLayout& best() const { return found.front(); }
};

namespace detail {
/// Returns the name of a layout for messages: "dp 64 × tp 8, ac full, ZeRO-3"; cp and micro-batches
/// are included if above 1.
std::string name_of(const TrainingLayout& layout);
}  // namespace detail

/// Returns how many of `blocks` blocks to checkpoint (at least 1), so that the peak is at most
/// `room` bytes. Linear interpolation never underestimates the peak, because the true peak is
/// convex.
std::int64_t checkpointed_blocks(std::int64_t peak_of_none, std::int64_t peak_of_all,
                                 std::int64_t room, std::int64_t blocks);

/// Returns a function for SearchSpace::estimate. The function plans the first rank of two runs with
/// few layers, and extrapolates linearly. Models with few or unequal layers are planned as a whole.
/// `run_of(layout, n)` creates a run with n layers (0: all layers). `layers`: the number of equal
/// layers, or 0. `container`: the FQN of the layers' parent, "model.layers".
std::function<Estimate(const TrainingLayout& layout)> estimate_by_plans(
    const std::function<MakeRun(const TrainingLayout& layout, std::int64_t layers)>& run_of,
    std::int64_t layers, const std::string& container, std::int64_t ranks,
    const PlanOptions& options);

/// Estimates all combinations of a tp size within a node, a kind of activation checkpointing, and
/// ZeRO-2 or 3. Where only full checkpointing fits, adds a layout with the fewest checkpointed
/// blocks. If no layout fits, tries more micro-batches, then cp. Also tries cp for sequences of
/// 16384 tokens or more. Throws Error if no layout can be planned.
Search search(const SearchSpace& space);

}  // namespace tessera::planning
TESSERA_API_END
