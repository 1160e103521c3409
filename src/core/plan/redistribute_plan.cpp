// The redistribution planner finds the cheapest steps from one layout to another. Every rank
// computes the same plan without communication, so ties must be broken equally on all ranks.
#include "tessera/core/detail/redistribute_plan.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <ostream>
#include <queue>
#include <unordered_map>
#include <utility>

#include "layout/digits.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

// A SearchState lists the possible next steps from a layout. Mesh dimensions divide a Digit
// (sub-dimension) in order. A collective can append or remove only the last mesh dimensions.

/// A redistribution to plan: a tensor of global sizes `sizes` must get layout `to`.
struct Problem {
  LayoutPtr to = nullptr;
  std::span<const std::int64_t> sizes;
  std::int64_t itemsize = 1;
  /// Tensor dimensions that a plan may shard temporarily over a mesh dimension, although layout
  /// `to` does not shard them over this mesh dimension.
  std::vector<int> temporary_dims;

  std::int64_t size(int dim) const { return sizes[static_cast<std::size_t>(dim)]; }
  std::int64_t mesh_size(int dim) const { return detail::mesh_size(to->mesh_sizes(), dim); }
};

using Digits = std::vector<Digit>;

bool contains(std::span<const int> list, int value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

/// Returns `digits` with only the mesh dimensions in `present`. Returns nullopt if a removed mesh
/// dimension precedes a remaining mesh dimension of the same Digit (sub-dimension).
std::optional<Digits> restricted(Digits digits, std::span<const int> present) {
  for (auto& digit : digits) {
    auto& dims = digit.mesh_dims;
    const auto end =
        std::find_if(dims.begin(), dims.end(), [&](int m) { return !contains(present, m); });
    if (std::any_of(end, dims.end(), [&](int m) { return contains(present, m); })) {
      return std::nullopt;
    }
    dims.erase(end, dims.end());
  }
  return digits;
}

std::vector<int> with(std::vector<int> list, std::span<const int> more) {
  list.insert(list.end(), more.begin(), more.end());
  return list;
}

/// A tensor dimension that a step shards over additional mesh dimensions, and the Digits
/// (sub-dimensions) of this tensor dimension after the step.
struct Destination {
  int dim = 0;
  Digits digits;
};

/// The last mesh dimensions of a Digit (sub-dimension). One collective can remove only the last
/// mesh dimensions, because their chunks are within the chunks of earlier mesh dimensions.
struct Tail {
  int dim = 0;
  std::size_t digit = 0;
  std::vector<int> mesh_dims;
};

/// A layout between the start and the target of a redistribution, and the possible next steps.
///
/// Settled mesh dimensions are the first mesh dimensions of a tensor dimension that shard as in the
/// target. No step moves a settled mesh dimension.
class SearchState {
 public:
  /// `problem` must outlive the SearchState.
  SearchState(const Problem& problem, LayoutPtr layout)
      : problem_(problem),
        layout_(layout),
        settled_(static_cast<std::size_t>(layout->mesh_ndim()), false),
        complete_(static_cast<std::size_t>(layout->tensor_ndim()), true) {
    for (int d = 0; d < layout->tensor_ndim(); ++d) {
      settle(d);
    }
  }

  const LayoutPtr& layout() const { return layout_; }
  const Problem& problem() const { return problem_; }
  bool is_settled(int mesh_dim) const { return settled_[static_cast<std::size_t>(mesh_dim)]; }
  bool is_replicated_on(int mesh_dim) const {
    return layout_->sharded_dim(mesh_dim) < 0 && layout_->partial_on(mesh_dim) == nullptr;
  }

  /// Returns each list of mesh dimensions (Tail) that one collective can remove from a tensor
  /// dimension. A Tail has no settled mesh dimension and forms one process group.
  std::vector<Tail> tails() const {
    std::vector<Tail> out;
    for (int d = 0; d < layout_->tensor_ndim(); ++d) {
      const auto& digits = layout_->digits(d);
      for (std::size_t g = 0; g < digits.size(); ++g) {
        const auto& order = digits[g].mesh_dims;
        for (auto first = order.rbegin(); first != order.rend() && !is_settled(*first); ++first) {
          Tail tail{d, g, std::vector<int>(std::prev(first.base()), order.end())};
          if (!is_group(d, digits, tail.mesh_dims)) {
            break;
          }
          out.push_back(std::move(tail));
        }
      }
    }
    return out;
  }

  /// Returns the sets of partial mesh dimensions that one collective can reduce next. A set has one
  /// reduction. The reduction must commute with reductions of inner mesh dimensions outside the
  /// set.
  std::vector<std::vector<int>> reducible_sets() const {
    const auto& partial = layout_->partial();
    std::vector<std::vector<int>> out;
    // Visits each non-empty subset of `partial`; bit i of `set` stands for partial[i].
    for (unsigned set = 1; set < 1U << partial.size(); ++set) {
      std::vector<int> dims;
      bool legal = true;
      const PartialDim* outermost = nullptr;
      for (std::size_t i = 0; i < partial.size(); ++i) {
        if ((set >> i & 1U) != 0) {
          if (outermost == nullptr) {
            outermost = &partial[i];
          }
          legal = legal && partial[i].op == outermost->op;
          dims.push_back(partial[i].mesh_dim);
        } else if (outermost != nullptr) {
          legal = legal && commute(partial[i].op, outermost->op);
        }
      }
      if (legal) {
        out.push_back(std::move(dims));
      }
    }
    return out;
  }

  /// Sorts `mesh_dims` by the order in which the target layout divides a tensor dimension, because
  /// the order decides each rank's chunk. Other mesh dimensions are last.
  std::vector<int> in_final_order(std::vector<int> mesh_dims) const {
    const int dim = problem_.to->sharded_dim(mesh_dims.front());
    if (dim < 0) {
      return mesh_dims;
    }
    const auto order = problem_.to->mesh_dims_of(dim);
    std::stable_sort(mesh_dims.begin(), mesh_dims.end(), [&](int a, int b) {
      return std::find(order.begin(), order.end(), a) < std::find(order.begin(), order.end(), b);
    });
    return mesh_dims;
  }

  /// Returns the tensor dimension that the target shards over all of `mesh_dims`. Returns nullopt
  /// if there is none, or if other steps must come first.
  std::optional<Destination> final_destination(std::span<const int> mesh_dims) const {
    const int dim = problem_.to->sharded_dim(mesh_dims.front());
    if (dim < 0 || !complete_[static_cast<std::size_t>(dim)]) {
      return std::nullopt;
    }
    const auto& there = problem_.to->digits(dim);
    const auto after = with(layout_->mesh_dims_of(dim), mesh_dims);
    const auto all_there = problem_.to->mesh_dims_of(dim);
    // In the target, all of `mesh_dims` must divide the same tensor dimension. Otherwise smaller
    // sets of mesh dimensions are moved one by one.
    if (!std::all_of(mesh_dims.begin(), mesh_dims.end(),
                     [&](int m) { return contains(all_there, m); })) {
      return std::nullopt;
    }
    auto digits = restricted(there, after);
    if (!digits || !is_group(dim, *digits, mesh_dims)) {
      return std::nullopt;
    }
    return Destination{dim, std::move(*digits)};
  }

  /// Returns the tensor dimensions to which `mesh_dims` can be moved. The tensor dimension of the
  /// target is first, because the first of several equally cheap plans wins.
  std::vector<Destination> destinations(std::span<const int> mesh_dims) const {
    std::vector<Destination> out;
    if (auto destination = final_destination(mesh_dims)) {
      out.push_back(std::move(*destination));
    }
    for (const int dim : problem_.temporary_dims) {
      auto digits = layout_->digits(dim);
      // A mesh dimension must not be appended temporarily to its tensor dimension in the target:
      // the order of divisions would be wrong.
      const bool is_final = std::any_of(mesh_dims.begin(), mesh_dims.end(),
                                        [&](int m) { return problem_.to->sharded_dim(m) == dim; });
      // A tensor dimension with several Digits (sub-dimensions) is skipped: the sizes of the tensor
      // and the mesh would decide to which Digit a mesh dimension can be appended.
      if (digits.size() > 1 || is_final) {
        continue;
      }
      if (digits.empty()) {
        digits.emplace_back();
      }
      digits[0].mesh_dims = with(std::move(digits[0].mesh_dims), mesh_dims);
      if (is_group(dim, digits, mesh_dims)) {
        out.push_back({dim, std::move(digits)});
      }
    }
    return out;
  }

  /// Returns the layout after a step that gathers or moves the mesh dimensions of `tail`.
  LayoutPtr after_removal(const Tail& tail, const Destination* destination = nullptr) const {
    auto dims = layout_->dims();
    auto& order = dims[static_cast<std::size_t>(tail.dim)][tail.digit].mesh_dims;
    order.resize(order.size() - tail.mesh_dims.size());
    return interned(std::move(dims), layout_->partial(), destination);
  }

  /// Returns the layout after an all-reduce, a reduce-scatter or a slice over `mesh_dims`.
  /// `destination`: the tensor dimension that the step shards; nullptr for an all-reduce.
  LayoutPtr after_reduction(std::span<const int> mesh_dims,
                            const Destination* destination = nullptr) const {
    auto partial = layout_->partial();
    std::erase_if(partial, [&](const auto& p) { return contains(mesh_dims, p.mesh_dim); });
    return interned(layout_->dims(), std::move(partial), destination);
  }

  LayoutPtr after_make_partial(PartialDim made) const {
    auto partial = layout_->partial();
    partial.push_back(made);
    return interned(layout_->dims(), std::move(partial), nullptr);
  }

 private:
  /// Finds the settled mesh dimensions (see SearchState) of tensor dimension `dim`. If `dim` has
  /// several Digits (sub-dimensions), either all or none of its mesh dimensions are settled.
  void settle(int dim) {
    const auto& here = layout_->digits(dim);
    if (here.empty()) {
      return;
    }
    const auto& there = problem_.to->digits(dim);
    const auto present = layout_->mesh_dims_of(dim);
    std::size_t settled = 0;
    // With several Digits (sub-dimensions), equal orders of mesh dimensions do not suffice: an
    // order does not show which Digit a mesh dimension divides.
    if (here.size() > 1 || there.size() > 1) {
      if (fits_several_digits(dim, present)) {
        settled = present.size();
      }
    } else if (!there.empty()) {
      const auto& order = there[0].mesh_dims;
      while (settled < std::min(present.size(), order.size()) &&
             present[settled] == order[settled]) {
        ++settled;
      }
    }
    for (std::size_t i = 0; i < settled; ++i) {
      settled_[static_cast<std::size_t>(present[i])] = true;
    }
    complete_[static_cast<std::size_t>(dim)] = settled == present.size();
  }

  LayoutPtr interned(Layout::Dims dims, std::vector<PartialDim> partial,
                     const Destination* destination) const {
    if (destination != nullptr) {
      dims[static_cast<std::size_t>(destination->dim)] = destination->digits;
    }
    return Layout::intern(layout_->mesh_sizes(), std::move(dims), std::move(partial));
  }

  /// Whether `dim` has the Digits (sub-dimensions) that the target has with only the mesh
  /// dimensions in `present`. Compares canonical forms, because restricted Digits can merge.
  bool fits_several_digits(int dim, const std::vector<int>& present) const {
    const auto& there = problem_.to->digits(dim);
    if (there.size() <= 1) {
      return false;
    }
    const auto part = restricted(there, present);
    return part && detail::canonical_digits(layout_->mesh_sizes(), *part) == layout_->digits(dim);
  }

  /// Whether one process group over `mesh_dims` makes the same chunks as these mesh dimensions one
  /// after another. All mesh dimensions of the Digit (sub-dimension) must divide the Digit evenly.
  bool is_group(int dim, const Digits& digits, std::span<const int> mesh_dims) const {
    if (mesh_dims.size() == 1) {
      return true;
    }
    const auto digit = std::find_if(digits.begin(), digits.end(), [&](const Digit& d) {
      return contains(d.mesh_dims, mesh_dims.front());
    });
    const auto& order = digit->mesh_dims;
    if (order.size() < mesh_dims.size() ||
        !std::equal(mesh_dims.rbegin(), mesh_dims.rend(), order.rbegin())) {
      return false;
    }
    // One process group cuts at other boundaries than nested mesh dimensions if chunks are uneven.
    const auto extent = digit->extent == 0 ? problem_.size(dim) : digit->extent;
    return extent % detail::mesh_product(layout_->mesh_sizes(), order) == 0;
  }

  const Problem& problem_;
  LayoutPtr layout_;
  // For each mesh dimension: whether the mesh dimension is settled (see SearchState).
  std::vector<bool> settled_;
  // For each tensor dimension: whether all mesh dimensions that shard the dimension are settled.
  std::vector<bool> complete_;
};

// The costs of redistribution steps: bytes, time by a CostModel, and the lower bound for the A*
// search. Bytes are those of the rank that sends most.

/// The assumed time of a collective: latency_us + bytes / bytes_per_us microseconds, where bytes is
/// Step::bytes.
struct CostModel {
  double latency_us;
  double bytes_per_us;
};

/// A CostModel with rough values for the GPUs of a single machine: 10 us and 80 GB/s.
constexpr CostModel kTime{.latency_us = 10, .bytes_per_us = 80'000};
/// A CostModel that prefers fewer bytes: one byte costs as much as the latency of 1000 collectives.
constexpr CostModel kBytesFirst{.latency_us = 1, .bytes_per_us = 1e-3};

/// The assumed time of a step without communication. The time is not 0, so that of two plans with
/// equal communication the plan with fewer steps wins.
constexpr double kLocalStepUs = 0.5;

/// Returns the coordinate of the rank with the largest shard: torch.chunk puts shorter chunks last.
std::vector<std::int64_t> first_coordinate(const Problem& problem) {
  return std::vector<std::int64_t>(problem.to->mesh_sizes().size(), 0);
}

/// Returns the coordinate that is last along `mesh_dims`, where the shards are smallest.
std::vector<std::int64_t> last_coordinate(const Problem& problem,
                                          const std::vector<int>& mesh_dims) {
  auto out = first_coordinate(problem);
  for (const int m : mesh_dims) {
    out[static_cast<std::size_t>(m)] = problem.mesh_size(m) - 1;
  }
  return out;
}

/// Returns the largest number of elements that a rank sends in an all-to-all. The last rank sends
/// most, because the last rank keeps the smallest chunk.
std::int64_t all_to_all_elements(const Problem& problem, const Step& step, std::int64_t local) {
  const auto size = problem.size(step.to_dim);
  const auto before = local_size(*step.from, step.to_dim, size, first_coordinate(problem));
  const auto kept =
      local_size(*step.to, step.to_dim, size, last_coordinate(problem, step.mesh_dims));
  return before == 0 ? 0 : local / before * (before - kept);
}

/// Returns the number of elements that one rank sends in a step, with ring algorithms.
std::int64_t elements(const Problem& problem, const Step& step) {
  const auto parts = detail::mesh_product(problem.to->mesh_sizes(), step.mesh_dims);
  const auto local = local_numel(*step.from, problem.sizes, first_coordinate(problem));
  switch (step.kind) {
    case StepKind::kAllGather:
      return local * (parts - 1);
    case StepKind::kReduceScatter:  // all shards are padded to the largest shard
      return local_numel(*step.to, problem.sizes, first_coordinate(problem)) * (parts - 1);
    case StepKind::kAllReduce:
      return 2 * (local - local / parts);
    case StepKind::kAllToAll:
      return all_to_all_elements(problem, step, local);
    case StepKind::kSlice:
    case StepKind::kMakePartial:
    case StepKind::kRelabel:
      return 0;
  }
  return 0;
}

/// Estimated numbers of elements per rank, not rounded up. `needed`: the elements of the target
/// shard. `present`: how many of these elements the rank has.
struct Shares {
  double needed = 1;
  double present = 1;
};

/// Estimates Shares::needed and Shares::present, as if all divisions were even. A mesh dimension
/// that shards different tensor dimensions now and in the target reduces `present`.
Shares shares(const SearchState& state) {
  const auto& problem = state.problem();
  Shares out;
  for (const auto size : problem.sizes) {
    out.needed *= static_cast<double>(size);
  }
  out.present = out.needed;
  for (int m = 0; m < problem.to->mesh_ndim(); ++m) {
    const auto parts = static_cast<double>(problem.mesh_size(m));
    const int here = state.layout()->sharded_dim(m);
    const int there = problem.to->sharded_dim(m);
    if (there >= 0) {
      out.needed /= parts;
      out.present /= parts;
    }
    if (here >= 0 && here != there) {
      out.present /= parts;
    }
  }
  return out;
}

/// The number of different reductions that must still run; each reduction needs its own collective.
int pending_reductions(const SearchState& state) {
  unsigned ops = 0;
  for (const auto& partial : state.layout()->partial()) {
    const auto* kept = state.problem().to->partial_on(partial.mesh_dim);
    if (kept == nullptr || kept->op != partial.op) {
      ops |= 1U << static_cast<unsigned>(partial.op);
    }
  }
  return __builtin_popcount(ops);
}

/// Whether some mesh dimension must be removed from the tensor dimension that it shards, which
/// needs at least one collective.
bool has_pending_shard(const SearchState& state) {
  for (int m = 0; m < state.layout()->mesh_ndim(); ++m) {
    if (state.layout()->sharded_dim(m) >= 0 && !state.is_settled(m)) {
      return true;
    }
  }
  return false;
}

/// The time of a step in microseconds by the alpha-beta model: latency plus bytes divided by
/// bandwidth. Step::bytes must be set.
double step_cost(const CostModel& model, const Step& step) {
  if (!communicates(step)) {
    return kLocalStepUs;
  }
  return model.latency_us + static_cast<double>(step.bytes) / model.bytes_per_us;
}

/// A lower bound of the cost from `layout` to the target: each unavoidable collective once, and the
/// bytes that a rank must receive. Too high a bound would hide cheap plans.
double least_cost(const CostModel& model, const Problem& problem, LayoutPtr layout) {
  const SearchState state(problem, layout);
  const int reductions = pending_reductions(state);
  const int collectives = reductions + (has_pending_shard(state) ? 1 : 0);
  if (collectives == 0) {
    return 0;
  }
  const auto [needed, present] = shares(state);
  // If a reduction must still run, a rank's current values are not final, so the rank must receive
  // all elements of its target shard.
  const auto received = reductions > 0 ? needed : needed - present;
  return collectives * model.latency_us +
         received * static_cast<double>(problem.itemsize) / model.bytes_per_us;
}

// The functions from slice() to all_gather() each add the useful next steps of one StepKind. The
// search chooses among these steps by cost.

/// Proposes to shard a replicated tensor as in the target, by a local slice. Other slices are
/// omitted, because their shards would have to be gathered again.
void slice(const SearchState& state, std::vector<Step>& out) {
  for (int m = 0; m < state.layout()->mesh_ndim(); ++m) {
    if (!state.is_replicated_on(m)) {
      continue;
    }
    const auto destination = state.final_destination({&m, 1});
    if (!destination) {
      continue;
    }
    out.push_back({.kind = StepKind::kSlice,
                   .mesh_dims = {m},
                   .dim = destination->dim,
                   .from = state.layout(),
                   .to = state.after_reduction({&m, 1}, &*destination)});
  }
}

/// Proposes to make a replicated tensor Partial over a mesh dimension where the target is Partial.
/// The value becomes one term; the other terms are the identity.
void make_partial(const SearchState& state, std::vector<Step>& out) {
  const auto& now = state.layout()->partial();
  for (const auto& wanted : state.problem().to->partial()) {
    // Reductions over inner mesh dimensions run first (see Layout). An inner reduction that does
    // not commute with `wanted.op` would turn the identity values into other values.
    const bool survives = std::all_of(now.begin(), now.end(), [&](const PartialDim& p) {
      return p.mesh_dim < wanted.mesh_dim || commute(p.op, wanted.op);
    });
    if (!state.is_replicated_on(wanted.mesh_dim) || !survives) {
      continue;
    }
    out.push_back({.kind = StepKind::kMakePartial,
                   .mesh_dims = {wanted.mesh_dim},
                   .op = wanted.op,
                   .from = state.layout(),
                   .to = state.after_make_partial(wanted)});
  }
}

/// For each reducible set of mesh dimensions, proposes a reduce-scatter to the tensor dimension in
/// the target, or to one of Problem::temporary_dims.
void reduce_scatter(const SearchState& state, std::vector<Step>& out) {
  for (const auto& set : state.reducible_sets()) {
    const auto mesh_dims = state.in_final_order(set);
    for (const auto& destination : state.destinations(mesh_dims)) {
      out.push_back({.kind = StepKind::kReduceScatter,
                     .mesh_dims = mesh_dims,
                     .dim = destination.dim,
                     .op = state.layout()->partial_on(mesh_dims.front())->op,
                     .from = state.layout(),
                     .to = state.after_reduction(mesh_dims, &destination)});
    }
  }
}

void all_reduce(const SearchState& state, std::vector<Step>& out) {
  for (auto& mesh_dims : state.reducible_sets()) {
    const auto op = state.layout()->partial_on(mesh_dims.front())->op;
    const auto to = state.after_reduction(mesh_dims);
    out.push_back({.kind = StepKind::kAllReduce,
                   .mesh_dims = mesh_dims,
                   .op = op,
                   .from = state.layout(),
                   .to = to});
  }
}

/// Proposes to move the last mesh dimensions of one tensor dimension to another tensor dimension.
/// Reordering within one tensor dimension needs two such steps, or an all-gather.
void all_to_all(const SearchState& state, std::vector<Step>& out) {
  for (const auto& tail : state.tails()) {
    for (const auto& destination : state.destinations(tail.mesh_dims)) {
      if (destination.dim == tail.dim) {
        continue;
      }
      out.push_back({.kind = StepKind::kAllToAll,
                     .mesh_dims = tail.mesh_dims,
                     .dim = tail.dim,
                     .to_dim = destination.dim,
                     .from = state.layout(),
                     .to = state.after_removal(tail, &destination)});
    }
  }
}

/// Proposes all-gathers. A mesh dimension can always be gathered unless it already shards as in the
/// target, so the search reaches every target.
void all_gather(const SearchState& state, std::vector<Step>& out) {
  for (const auto& tail : state.tails()) {
    out.push_back({.kind = StepKind::kAllGather,
                   .mesh_dims = tail.mesh_dims,
                   .dim = tail.dim,
                   .from = state.layout(),
                   .to = state.after_removal(tail)});
  }
}

using Move = void (*)(const SearchState& state, std::vector<Step>& out);

// Of several plans of equal cost the search returns the first, so the order in kMoves matters.
constexpr std::array<Move, 6> kMoves{slice,      make_partial, reduce_scatter,
                                     all_reduce, all_to_all,   all_gather};

/// The maximum number of tensor dimensions in Problem::temporary_dims.
constexpr std::size_t kTemporaryDims = 2;

/// A shortest-path search over layouts by A* (Hart, Nilsson and Raphael 1968). least_cost never
/// exceeds the true cost. Ties go to the node that was found first, so all ranks find the same
/// plan.
class Search {
 public:
  Search(const Problem& problem, const CostModel& model) : problem_(problem), model_(model) {}

  // run() always finds a path, because at least the all-gathers (see all_gather()) are possible.
  std::vector<Step> run(LayoutPtr from) {
    reach(from, 0, kNone, {});
    while (!queue_.empty()) {
      // A node can have several entries in the queue, because each cheaper path adds an entry. The
      // first entry has the lowest cost; later entries are skipped.
      const auto [estimate, number] = queue_.top();
      queue_.pop();
      if (nodes_[number].layout == problem_.to) {
        return steps_to(number);
      }
      if (!nodes_[number].done) {
        expand(number);
      }
    }
    fail("no sequence of collectives redistributes a tensor from ", to_string(*from), " to ",
         to_string(*problem_.to));
  }

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  // A layout that the search has found, with the cheapest known path to it.
  struct Node {
    LayoutPtr layout = nullptr;
    double cost = 0;
    std::size_t parent = kNone;
    Step step;
    bool done = false;
  };
  // An entry of the search queue. Entries with equal estimates are sorted by node index, so that
  // the result does not depend on the implementation of std::priority_queue.
  struct Entry {
    double estimate = 0;  // estimated cost of the whole path through the node
    std::size_t number = 0;
    // The comparison is inverted, because the top of a std::priority_queue is its largest entry.
    friend bool operator<(const Entry& a, const Entry& b) {
      return a.estimate != b.estimate ? a.estimate > b.estimate : a.number > b.number;
    }
  };

  void expand(std::size_t number) {
    nodes_[number].done = true;
    proposed_.clear();
    const SearchState state(problem_, nodes_[number].layout);
    for (const auto move : kMoves) {
      move(state, proposed_);
    }
    for (auto& step : proposed_) {
      step.bytes = elements(problem_, step) * problem_.itemsize;
      const auto cost = nodes_[number].cost + step_cost(model_, step);
      // `step.to` is copied before the call of reach(), because `step` is moved in the call.
      const auto to = step.to;
      reach(to, cost, number, std::move(step));
    }
  }

  // Records a path to `layout` that is the cheapest so far. A cheaper path reopens a finished node,
  // because the A* estimate is admissible but not consistent.
  void reach(LayoutPtr layout, double cost, std::size_t parent, Step step) {
    const auto [known, is_new] = numbers_.try_emplace(layout, nodes_.size());
    if (!is_new && nodes_[known->second].cost <= cost) {
      return;
    }
    if (is_new) {
      nodes_.emplace_back();
    }
    nodes_[known->second] = {layout, cost, parent, std::move(step), false};
    queue_.push({cost + least_cost(model_, problem_, layout), known->second});
  }

  std::vector<Step> steps_to(std::size_t number) {
    std::vector<Step> out;
    for (; nodes_[number].parent != kNone; number = nodes_[number].parent) {
      out.push_back(std::move(nodes_[number].step));
    }
    std::reverse(out.begin(), out.end());
    return out;
  }

  const Problem& problem_;
  const CostModel& model_;
  std::vector<Node> nodes_;
  std::unordered_map<LayoutPtr, std::size_t> numbers_;
  std::priority_queue<Entry> queue_;
  std::vector<Step> proposed_;
};

/// Throws Error unless both layouts are for the same mesh and number of tensor dimensions, because
/// the search uses dimensions of one layout as indices in the other layout.
void check_arguments(LayoutPtr from, LayoutPtr to, std::span<const std::int64_t> sizes) {
  TESSERA_CHECK(from->mesh_sizes() == to->mesh_sizes(), "redistribution from ", to_string(*from),
                " to ", to_string(*to),
                " is between different meshes; pass two layouts of one mesh");
  TESSERA_CHECK(from->tensor_ndim() == to->tensor_ndim() &&
                    static_cast<int>(sizes.size()) == to->tensor_ndim(),
                "redistribution from ", to_string(*from), " to ", to_string(*to),
                " is for a tensor with ", sizes.size(), " dimensions, but the layouts are for ",
                from->tensor_ndim(), " and ", to->tensor_ndim());
}

/// Returns the largest tensor dimensions. Shards of a large dimension need the least padding.
std::vector<int> largest_dims(std::span<const std::int64_t> sizes) {
  std::vector<int> dims(sizes.size());
  std::iota(dims.begin(), dims.end(), 0);
  std::stable_sort(dims.begin(), dims.end(), [&](int a, int b) {
    return sizes[static_cast<std::size_t>(a)] > sizes[static_cast<std::size_t>(b)];
  });
  dims.resize(std::min(dims.size(), kTemporaryDims));
  return dims;
}

/// Adds a step that only replaces the layout. `from` and `to` differ only on mesh dimensions of
/// size 1, so the local tensors are equal.
void relabel(std::vector<Step>& steps, LayoutPtr from, LayoutPtr to) {
  if (from != to) {
    steps.push_back({.kind = StepKind::kRelabel, .mesh_dims = {}, .from = from, .to = to});
  }
}

std::int64_t bytes_of(const std::vector<Step>& steps) {
  return std::accumulate(steps.begin(), steps.end(), std::int64_t{0},
                         [](std::int64_t sum, const Step& step) { return sum + step.bytes; });
}

/// Returns the fastest plan, unless a plan without Problem::temporary_dims sends fewer bytes.
/// PyTorch's greedy planner uses no temporary dimensions, so the result never sends more bytes than
/// PyTorch's plan.
std::vector<Step> search(Problem problem, LayoutPtr from) {
  auto fastest = Search(problem, kTime).run(from);
  // A plan of one step cannot be improved, so most redistributions need only one search.
  if (fastest.size() == 1) {
    return fastest;
  }
  problem.temporary_dims.clear();
  auto fewest_bytes = Search(problem, kBytesFirst).run(from);
  return bytes_of(fastest) <= bytes_of(fewest_bytes) ? fastest : fewest_bytes;
}

}  // namespace

std::int64_t RedistributionPlan::bytes() const {
  return bytes_of(steps);
}

RedistributionPlan plan_redistribution(LayoutPtr from, LayoutPtr to,
                                       std::span<const std::int64_t> sizes, std::int64_t itemsize) {
  check_arguments(from, to, sizes);
  // The search ignores mesh dimensions of size 1. relabel() handles mesh dimensions of size 1.
  const auto start = detail::without_unit_mesh_dims(from);
  const auto end = detail::without_unit_mesh_dims(to);
  RedistributionPlan plan;
  if (start == end) {
    relabel(plan.steps, from, to);
  } else {
    relabel(plan.steps, from, start);
    auto steps = search({end, sizes, itemsize, largest_dims(sizes)}, start);
    std::move(steps.begin(), steps.end(), std::back_inserter(plan.steps));
    relabel(plan.steps, end, to);
  }
  return plan;
}

namespace {

constexpr std::array kNames{"all-gather", "reduce-scatter", "all-reduce", "all-to-all",
                            "slice",      "make-partial",   "relabel"};

std::string to_string(const Step& step) {
  std::string out = kNames[static_cast<std::size_t>(step.kind)];
  if (step.dim >= 0) {
    out += " dim " + std::to_string(step.dim);
  }
  if (step.to_dim >= 0) {
    out += " to " + std::to_string(step.to_dim);
  }
  for (std::size_t i = 0; i < step.mesh_dims.size(); ++i) {
    out += (i == 0 ? " over m" : ",m") + std::to_string(step.mesh_dims[i]);
  }
  if (communicates(step)) {
    out += ", " + std::to_string(step.bytes) + " bytes";
  }
  return out + ": " + to_string(*step.from) + " -> " + to_string(*step.to);
}

}  // namespace

std::string to_string(const RedistributionPlan& plan) {
  std::string out;
  for (const auto& step : plan.steps) {
    out += to_string(step) + "\n";
  }
  return out;
}

std::ostream& operator<<(std::ostream& stream, const RedistributionPlan& plan) {
  return stream << to_string(plan);
}

}  // namespace tessera
