// Tries training layouts by increasing memory; if a layout does not fit, skips larger layouts.
#include "tessera/planning/detail/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::planning {
namespace {

/// The types of activation checkpointing, and the ZeRO stages (kZero): least memory first.
constexpr std::array kActivations{"full", "selective", "none"};
constexpr std::array kZero{3, 2};
/// The degrees of context parallelism to try: for long sequences, or if no other layout fits.
constexpr std::array<std::int64_t, 3> kSplits{2, 4, 8};
constexpr std::int64_t kLongSequence = 16384;

std::int64_t most_tp(const SearchSpace& s) {
  return s.fixed.contains("tp") ? s.first.tp : std::min(s.ranks, s.machine.ranks_per_node);
}

/// Returns the possible meshes for `cp` context-parallel ranks and `accumulate` micro-batches. Each
/// rank's samples must be divisible by `accumulate`, unless the caller has chosen `accumulate`.
std::vector<TrainingLayout> meshes(const SearchSpace& s, std::int64_t cp, std::int64_t accumulate) {
  std::vector<TrainingLayout> meshes;
  for (std::int64_t tp = s.fixed.contains("tp") ? s.first.tp : 1; tp <= most_tp(s); ++tp) {
    const std::int64_t dp = s.ranks / (tp * cp * s.dp_replicate);
    const bool divides =
        dp * tp * cp * s.dp_replicate == s.ranks && (!s.allows_tp || s.allows_tp(tp));
    const bool asked = !s.fixed.contains("dp") || dp == s.first.dp;
    const bool has_rows = accumulate == s.first.accumulate ||
                          (dp > 0 && s.batch % (s.dp_replicate * dp * accumulate) == 0);
    if (divides && asked && has_rows) {
      TrainingLayout mesh = s.first;
      mesh.dp = dp;
      mesh.tp = tp;
      mesh.cp = cp;
      mesh.accumulate = accumulate;
      meshes.push_back(std::move(mesh));
    }
  }
  return meshes;
}

/// Layouts that do not fit into memory, as pairs of indices in kActivations and kZero.
using TooLarge = std::vector<std::pair<std::size_t, std::size_t>>;

/// Tries all layouts of one mesh, in the order of their memory, least memory first.
class MeshSearch {
 public:
  MeshSearch(Search& search, TrainingLayout mesh, TooLarge too_large)
      : search_(search), mesh_(std::move(mesh)), too_large_(std::move(too_large)) {}

  /// Estimates the mesh's layouts. Returns the layouts that do not fit into the machine's memory.
  TooLarge run() {
    const SearchSpace& s = search_.space;
    const std::int64_t parts = s.dp_replicate * mesh_.dp * mesh_.accumulate;
    if (s.batch % parts != 0) {
      search_.refused.emplace_back(
          mesh_, fmt::format("batch {} is not a multiple of {} micro-batches", s.batch, parts));
      return too_large_;
    }
    first_ = std::ssize(search_.found);
    for (std::size_t ac = 0; ac < kActivations.size(); ++ac) {
      for (std::size_t zero = 0; zero < kZero.size(); ++zero) {
        if ((!s.fixed.contains("ac") || s.first.ac == kActivations[ac]) &&
            (!s.fixed.contains("zero") || s.first.zero == kZero[zero])) {
          visit(ac, zero);
        }
      }
    }
    add_partial();
    return too_large_;
  }

 private:
  void visit(std::size_t ac, std::size_t zero) {
    const bool is_hopeless = std::ranges::any_of(
        too_large_, [&](const auto& other) { return other.first <= ac && other.second <= zero; });
    if (is_hopeless && !may_fit_in_part(ac, zero)) {
      ++search_.skipped;
      return;
    }
    TrainingLayout layout = mesh_;
    layout.ac = kActivations[ac];
    layout.zero = kZero[zero];
    try {
      FoundLayout found{.layout = layout, .estimate = search_.space.estimate(layout)};
      // Step times are rounded to nanoseconds, because sums in a different order differ in the last
      // bits.
      double& seconds = found.estimate.metrics.step_time_s;
      seconds = std::round(1e9 * seconds) / 1e9;
      found.fits = found.estimate.peak_bytes <= search_.space.machine.room();
      if (!found.fits) {
        too_large_.emplace_back(ac, zero);
      }
      search_.found.push_back(std::move(found));
    } catch (const Error& error) {
      search_.refused.emplace_back(layout, error.what());
    }
  }

  /// Whether the layout that checkpoints no activations must be estimated even though it does not
  /// fit: layouts that checkpoint only some blocks are interpolated from this layout's estimate.
  bool may_fit_in_part(std::size_t ac, std::size_t zero) const {
    const auto fits = [&](const FoundLayout& all) {
      return all.fits && all.layout.zero == kZero[zero];
    };
    return search_.space.blocks > 1 && ac + 1 == kActivations.size() &&
           std::any_of(search_.found.begin() + first_, search_.found.end(), fits);
  }

  /// Adds layouts that checkpoint only some blocks, if a layout fits with all blocks checkpointed
  /// but does not fit without activation checkpointing.
  void add_partial() {
    const std::vector<FoundLayout> own(search_.found.begin() + first_, search_.found.end());
    for (const FoundLayout& none : own) {
      for (const FoundLayout& all : own) {
        if (none.layout.ac == "none" && !none.fits && all.fits &&
            all.layout.zero == none.layout.zero) {
          add_between(none, all);
        }
      }
    }
  }

  void add_between(const FoundLayout& none, const FoundLayout& all) {
    const std::int64_t blocks = search_.space.blocks;
    const std::int64_t count = checkpointed_blocks(
        none.estimate.peak_bytes, all.estimate.peak_bytes, search_.space.machine.room(), blocks);
    if (count >= blocks) {
      return;
    }
    const double share = static_cast<double>(count) / static_cast<double>(blocks);
    FoundLayout some = all;
    some.layout.ac += fmt::format(":{}", count);
    some.estimate.peak_bytes =
        std::llround(std::lerp(static_cast<double>(none.estimate.peak_bytes),
                               static_cast<double>(all.estimate.peak_bytes), share));
    some.estimate.exposed_s = std::lerp(none.estimate.exposed_s, all.estimate.exposed_s, share);
    observe::StepMetrics& metrics = some.estimate.metrics;
    metrics.step_time_s = std::lerp(none.estimate.metrics.step_time_s, metrics.step_time_s, share);
    const double faster = all.estimate.metrics.step_time_s / metrics.step_time_s;
    metrics.tokens_per_s *= faster;
    metrics.tflops *= faster;
    if (metrics.mfu) {
      *metrics.mfu *= faster;
    }
    search_.found.push_back(std::move(some));
  }

  Search& search_;
  TrainingLayout mesh_;
  TooLarge too_large_;
  std::ptrdiff_t first_ = 0;  ///< index in Search::found of this mesh's first layout
};

std::int64_t least_peak(const Search& search) {
  const auto peak = [](const FoundLayout& each) { return each.estimate.peak_bytes; };
  return peak(*std::ranges::min_element(search.found, {}, peak));
}

/// Sets FoundLayout::frontier. `found` must be sorted by time: a layout that fits is on the
/// frontier if all faster layouts that fit take more memory.
void mark_frontier(std::vector<FoundLayout>& found) {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (FoundLayout& each : found) {
    each.frontier = each.fits && each.estimate.peak_bytes < least;
    least = each.fits ? std::min(least, each.estimate.peak_bytes) : least;
  }
}

}  // namespace

std::string detail::name_of(const TrainingLayout& layout) {
  return fmt::format(
      "dp {} × tp {}{}, ac {}, ZeRO-{}{}", layout.dp, layout.tp,
      layout.cp > 1 ? fmt::format(" × cp {}", layout.cp) : "", layout.ac, layout.zero,
      layout.accumulate > 1 ? fmt::format(", {} micro-batches", layout.accumulate) : "");
}

std::int64_t checkpointed_blocks(std::int64_t peak_of_none, std::int64_t peak_of_all,
                                 std::int64_t room, std::int64_t blocks) {
  const auto saved = static_cast<double>(peak_of_none - peak_of_all);
  const double share = static_cast<double>(peak_of_none - room) / std::max(saved, 1.0);
  const double count = std::ceil(share * static_cast<double>(blocks));
  return static_cast<std::int64_t>(std::clamp(count, 1.0, static_cast<double>(blocks)));
}

namespace {

/// Runs a search for layouts: tries meshes, then more micro-batches, then context parallelism.
class LayoutSearch {
 public:
  explicit LayoutSearch(const SearchSpace& space) : search_{.space = space} {}

  Search run() {
    const SearchSpace& s = search_.space;
    try_meshes(s.first.cp, s.first.accumulate);
    if (!s.fixed.contains("accumulate") && !search_.found.empty()) {
      try_micro_batches();
    }
    const bool needs_splits = !fits() || s.sequence >= kLongSequence;
    for (const std::int64_t cp : kSplits) {
      if (needs_splits && !s.fixed.contains("cp") && s.allows_cp && s.allows_cp(cp)) {
        try_meshes(cp, s.first.accumulate);
      }
    }
    check();
    std::ranges::sort(search_.found, {}, [](const FoundLayout& each) {
      const double time = each.fits ? each.estimate.metrics.step_time_s : 0;
      return std::tuple(!each.fits, time, each.estimate.peak_bytes);
    });
    mark_frontier(search_.found);
    return std::move(search_);
  }

 private:
  bool fits() const { return std::ranges::any_of(search_.found, &FoundLayout::fits); }

  void try_meshes(std::int64_t cp, std::int64_t accumulate) {
    const TrainingLayout& first = search_.space.first;
    const bool is_first = cp == first.cp && accumulate == first.accumulate;
    for (TrainingLayout& mesh : meshes(search_.space, cp, accumulate)) {
      is_laid_out_ = true;
      const std::int64_t tp = mesh.tp;
      const bool as_whole = accumulate == first.accumulate;
      TooLarge found =
          MeshSearch(search_, std::move(mesh), as_whole ? too_large_[tp] : TooLarge()).run();
      if (is_first) {
        too_large_[tp] = std::move(found);
      }
    }
  }

  /// Doubles the number of micro-batches until a layout fits, or until doubling cannot help.
  void try_micro_batches() {
    const SearchSpace& s = search_.space;
    std::int64_t floor = 0;
    for (std::int64_t n = 2; n <= s.batch && !fits() && floor <= s.machine.room(); n *= 2) {
      const std::int64_t before = least_peak(search_);
      try_meshes(s.first.cp, n);
      // Each doubling halves the memory of a micro-batch. So the next doubling saves at most as
      // much memory as the last doubling.
      floor = least_peak(search_) - (before - least_peak(search_));
    }
  }

  void check() const {
    const SearchSpace& s = search_.space;
    TESSERA_CHECK(
        is_laid_out_, s.ranks, " ranks can't be laid out: no tensor-parallel degree of at most ",
        most_tp(s),
        " divides the number of ranks and suits the model and the other parallel degrees; "
        "leave out some degrees, or pass another number of ranks");
    if (search_.found.empty()) {
      const auto& [layout, reason] = search_.refused.front();
      fail(s.ranks, " ranks: no layout can be planned: ", detail::name_of(layout), ": ", reason);
    }
  }

  Search search_;
  bool is_laid_out_ = false;
  // For each number of tensor-parallel ranks: the layouts that do not fit into memory. Context
  // parallelism cannot help: a rank has as many tokens as before, and also needs masks, keys and
  // values.
  std::map<std::int64_t, TooLarge> too_large_;
};

}  // namespace

Search search(const SearchSpace& space) {
  TESSERA_CHECK(space.ranks <= detail::kMostRanks, "a search for ", space.ranks,
                " ranks is too large; search for at most ", detail::kMostRanks, " ranks");
  return LayoutSearch(space).run();
}

}  // namespace tessera::planning
