// From the layout that takes the least memory to those that take more: what takes more than one
// that does not fit is not planned.

#include "examples/llama/plan/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "examples/llama/models.h"
#include "tessera/core/error.h"

namespace llama {

using namespace tessera;

namespace {

/// By memory, the least first.
constexpr std::array kActivations{"full", "selective", "none"};
constexpr std::array kZero{3, 2};
/// Of context parallelism, where it is tried: the sequences of a batch are then more than its ranks
/// can have whole, or each takes much.
constexpr std::array<std::int64_t, 3> kSplits{2, 4, 8};
constexpr std::int64_t kLongSequence = 16384;

bool is_given(const TrainOptions& options, const char* flag) {
  return std::ranges::find(options.given, flag) != options.given.end();
}

/// The degrees that the flags leave open. `accumulate`: micro-batches; of another number than the
/// flags', only meshes whose ranks can have so many.
std::vector<Layout> meshes(const TrainOptions& o, const Machine& machine, std::int64_t gpus,
                           std::int64_t cp, std::int64_t accumulate) {
  const Config config = read_config(o.config);
  const std::int64_t most = is_given(o, "--tp") ? gpus : machine.ranks_per_node;
  std::vector<Layout> meshes;
  for (std::int64_t tp = 1; tp <= most; ++tp) {
    const std::int64_t dp = gpus / (tp * cp * o.dp_replicate);
    const bool divides =
        dp * tp * cp * o.dp_replicate == gpus && config.num_attention_heads % tp == 0;
    const bool asked = (!is_given(o, "--tp") || tp == o.tp) && (!is_given(o, "--dp") || dp == o.dp);
    const bool has_rows =
        accumulate == o.accumulate || (dp > 0 && o.batch % (o.dp_replicate * dp * accumulate) == 0);
    if (divides && asked && has_rows) {
      meshes.push_back(
          {.dp = dp, .tp = tp, .cp = cp, .ac = o.ac, .zero = o.zero, .accumulate = accumulate});
    }
  }
  return meshes;
}

/// Whether a run may split its sequences so: what llama_train refuses with --cp is left out.
bool may_split(const TrainOptions& o, std::int64_t cp) {
  return !is_given(o, "--cp") && o.seq % (2 * cp) == 0 && o.dropout == 0 && o.lora_dropout == 0;
}

/// Indices of kActivations and kZero that don't fit.
using TooLarge = std::vector<std::pair<std::size_t, std::size_t>>;

/// Layouts of a mesh, each behind those that take less memory.
class MeshSearch {
 public:
  /// `too_large`: known before.
  MeshSearch(Search& search, Layout mesh, TooLarge too_large)
      : search_(search), mesh_(std::move(mesh)), too_large_(std::move(too_large)) {}

  /// What does not fit.
  TooLarge run() {
    visit_all();
    return too_large_;
  }

 private:
  void visit_all() {
    const TrainOptions& o = search_.options;
    const std::int64_t parts = o.dp_replicate * mesh_.dp * mesh_.accumulate;
    if (o.batch % parts != 0) {
      search_.refused.push_back(
          {mesh_, fmt::format("--batch {} is not a multiple of {} micro-batches", o.batch, parts)});
      return;
    }
    for (std::size_t ac = 0; ac < kActivations.size(); ++ac) {
      for (std::size_t zero = 0; zero < kZero.size(); ++zero) {
        if ((!is_given(o, "--ac") || o.ac == kActivations[ac]) &&
            (!is_given(o, "--zero") || o.zero == kZero[zero])) {
          visit(ac, zero);
        }
      }
    }
  }

  void visit(std::size_t ac, std::size_t zero) {
    const bool is_hopeless = std::ranges::any_of(
        too_large_, [&](const auto& other) { return other.first <= ac && other.second <= zero; });
    if (is_hopeless) {
      ++search_.skipped;
      return;
    }
    Layout layout = mesh_;
    layout.ac = kActivations[ac];
    layout.zero = kZero[zero];
    try {
      FoundLayout found{.layout = layout,
                        .estimate = estimate_rank(with(search_.options, layout), search_.machine)};
      found.fits = found.estimate.peak_bytes <= search_.machine.room();
      if (!found.fits) {
        too_large_.emplace_back(ac, zero);
      }
      search_.found.push_back(std::move(found));
    } catch (const Error& error) {
      search_.refused.push_back({layout, error.what()});
    }
  }

  Search& search_;
  Layout mesh_;
  TooLarge too_large_;
};

std::int64_t least_peak(const Search& search) {
  const auto peak = [](const FoundLayout& each) { return each.estimate.peak_bytes; };
  return peak(*std::ranges::min_element(search.found, {}, peak));
}

/// `found` in order: of those that fit, each with less memory than all faster ones is on the
/// frontier.
void mark_frontier(std::vector<FoundLayout>& found) {
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (FoundLayout& each : found) {
    each.frontier = each.fits && each.estimate.peak_bytes < least;
    least = each.fits ? std::min(least, each.estimate.peak_bytes) : least;
  }
}

}  // namespace

std::string to_string(const Layout& layout) {
  const auto above_1 = [](const char* flag, std::int64_t value) {
    return value > 1 ? fmt::format(" {} {}", flag, value) : "";
  };
  return fmt::format("--dp {} --tp {}{} --ac {} --zero {}{}", layout.dp, layout.tp,
                     above_1("--cp", layout.cp), layout.ac, layout.zero,
                     above_1("--accumulate", layout.accumulate));
}

TrainOptions with(TrainOptions options, const Layout& layout) {
  options.dp = layout.dp;
  options.tp = layout.tp;
  options.cp = layout.cp;
  options.ac = layout.ac;
  options.zero = layout.zero;
  options.accumulate = layout.accumulate;
  return options;
}

bool Search::has_cp() const {
  return std::ranges::any_of(found, [](const FoundLayout& each) { return each.layout.cp > 1; });
}

bool Search::has_accumulation() const {
  return std::ranges::any_of(found,
                             [](const FoundLayout& each) { return each.layout.accumulate > 1; });
}

Search search_layouts(const TrainOptions& options, const Machine& machine, std::int64_t gpus) {
  Search search{.options = options, .machine = machine, .gpus = gpus};
  bool is_laid_out = false;
  // By tp. A split adds masks, and the keys and values of other ranks, to as many tokens of a rank:
  // what does not fit without one does not fit with it.
  std::map<std::int64_t, TooLarge> too_large;
  const auto try_meshes = [&](std::int64_t cp, std::int64_t accumulate) {
    const bool is_first = cp == options.cp && accumulate == options.accumulate;
    for (Layout& mesh : meshes(options, machine, gpus, cp, accumulate)) {
      is_laid_out = true;
      const std::int64_t tp = mesh.tp;
      const bool as_whole = accumulate == options.accumulate;
      TooLarge found =
          MeshSearch(search, std::move(mesh), as_whole ? too_large[tp] : TooLarge()).run();
      if (is_first) {
        too_large[tp] = std::move(found);
      }
    }
  };
  const auto fits = [&] { return std::ranges::any_of(search.found, &FoundLayout::fits); };
  try_meshes(options.cp, options.accumulate);
  const bool is_open = !is_given(options, "--accumulate") && !search.found.empty();
  const std::int64_t most = is_open ? options.batch : 1;
  std::int64_t floor = 0;
  for (std::int64_t n = 2; n <= most && !fits() && floor <= machine.room(); n *= 2) {
    const std::int64_t before = least_peak(search);
    try_meshes(options.cp, n);
    // What is of a micro-batch halves each time.
    floor = least_peak(search) - (before - least_peak(search));
  }
  const bool needs_splits = !fits() || options.seq >= kLongSequence;
  for (const std::int64_t cp : kSplits) {
    if (needs_splits && may_split(options, cp)) {
      try_meshes(cp, options.accumulate);
    }
  }
  TESSERA_CHECK(is_laid_out, "--gpus ", gpus, " can't be laid out: no tp of at most ",
                is_given(options, "--tp") ? gpus : machine.ranks_per_node,
                " that divides them and the ", read_config(options.config).num_attention_heads,
                " heads of the model goes with the --dp, --cp, --tp and --dp-replicate that are "
                "given; give fewer of these, or another number of GPUs");
  TESSERA_CHECK(!search.found.empty(), "--gpus ", gpus,
                ": no layout can be planned: ", to_string(search.refused.front().layout), ": ",
                search.refused.front().reason);
  std::ranges::sort(search.found, {}, [](const FoundLayout& each) {
    const double time = each.fits ? each.estimate.metrics.step_time_s : 0;
    return std::tuple(!each.fits, time, each.estimate.peak_bytes);
  });
  mark_frontier(search.found);
  return search;
}

}  // namespace llama
