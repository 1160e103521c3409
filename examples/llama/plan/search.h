// Which layouts of a run over a number of GPUs fit, and how long a step of each takes.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "examples/llama/plan/estimate.h"
#include "examples/llama/plan/machine.h"
#include "examples/llama/train/options/train_options.h"

namespace llama {

/// What a search chooses.
struct Layout {
  std::int64_t dp = 1, tp = 1, cp = 1;
  std::string ac;
  int zero = 3;
  std::int64_t accumulate = 1;
};
/// As flags: "--dp 64 --tp 8 --ac full --zero 3"; with --cp and --accumulate where they are
/// above 1.
std::string to_string(const Layout& layout);
/// The run with this layout.
TrainOptions with(TrainOptions options, const Layout& layout);

/// A layout and what is estimated of it.
struct FoundLayout {
  Layout layout;
  Estimate estimate;
  bool fits = false;
  bool frontier = false;  ///< it fits, and no other takes less memory and no more time
};
/// A layout that was not estimated.
struct RefusedLayout {
  Layout layout;
  std::string reason;
};

struct Search {
  TrainOptions options;  ///< with the rest of the run
  Machine machine;
  std::int64_t gpus = 0;
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

/// Estimates layouts of `gpus` ranks: tp within a node that divides the model's heads, each --ac,
/// --zero 2 and 3; where nothing fits without, also as many micro-batches as it takes; for
/// sequences of 16384 tokens and more, or where still nothing fits, also cp of 2, 4 and 8. What was
/// given as a flag stays as it is. Throws tessera::Error where no layout can be planned.
Search search_layouts(const TrainOptions& options, const Machine& machine, std::int64_t gpus);

}  // namespace llama
