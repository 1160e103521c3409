// The redistribution planner: finds the cheapest steps from one layout to another. It is pure and
// does not communicate: every rank computes the same plan, so ties must be broken in the same way
// everywhere. dtensor caches plans and executes them (redistribute/).
#include "tessera/core/detail/redistribute_plan.h"

#include <algorithm>
#include <numeric>
#include <ostream>
#include <queue>
#include <unordered_map>

#include "layout/digits.h"
#include "plan/search.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

using plan::Problem;

/// Problem::temporary_dims has at most this many tensor dimensions.
constexpr std::size_t kTemporaryDims = 2;

/// A shortest-path search over layouts by A* (Hart, Nilsson and Raphael 1968). plan::least_cost
/// never exceeds the true cost, so the first path that reaches the target is the cheapest. Of equal
/// costs, the node that was found first is preferred, so all ranks find the same plan. Takes O(n
/// log n) time for n visited layouts, which is exponential in the number of mesh dimensions in the
/// worst case; meshes have few dimensions, and plans are cached.
class Search {
 public:
  Search(const Problem& problem, const CostModel& model) : problem_(problem), model_(model) {}

  // The queue never becomes empty for layouts of one mesh, because all_gather is always possible.
  std::vector<Step> run(LayoutPtr from) {
    reach(from, 0, kNone, {});
    while (!queue_.empty()) {
      // A node may be in the queue several times, once for each cheaper path to the node. The first
      // of its entries that is taken out has the lowest cost; later entries are skipped.
      const auto [estimate, number] = queue_.top();
      queue_.pop();
      if (nodes_[number].layout == problem_.to) {
        return steps_to(number);
      }
      if (!nodes_[number].done) {
        expand(number);
      }
    }
    fail("no sequence of collectives leads from ", to_string(*from), " to ",
         to_string(*problem_.to));
  }

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  // A visited layout, with the cheapest path to it that was found so far.
  struct Node {
    LayoutPtr layout = nullptr;
    double cost = 0;
    std::size_t parent = kNone;
    Step step;
    bool done = false;
  };
  // An entry of the search queue. Of entries with equal estimates the lower node number is first,
  // so the result does not depend on the heap's implementation.
  struct Entry {
    double estimate = 0;  // estimated cost of the whole path through the entry's node
    std::size_t number = 0;
    // Inverted, because the top of a std::priority_queue is the largest entry.
    friend bool operator<(const Entry& a, const Entry& b) {
      return a.estimate != b.estimate ? a.estimate > b.estimate : a.number > b.number;
    }
  };

  void expand(std::size_t number) {
    nodes_[number].done = true;
    proposed_.clear();
    plan::propose_steps(problem_, nodes_[number].layout, proposed_);
    for (auto& step : proposed_) {
      step.bytes = plan::step_bytes(problem_, step);
      const auto cost = nodes_[number].cost + plan::step_cost(model_, step);
      // The layout after the step is copied first, because the step is moved from in this call.
      const auto to = step.to;
      reach(to, cost, number, std::move(step));
    }
  }

  // Records a path to `layout` if the layout is new or the path is cheaper than the known path. A
  // cheaper path reopens a finished node, because the estimate is admissible but not consistent.
  void reach(LayoutPtr layout, double cost, std::size_t parent, Step step) {
    const auto [known, is_new] = numbers_.try_emplace(layout, nodes_.size());
    if (!is_new && nodes_[known->second].cost <= cost) {
      return;
    }
    if (is_new) {
      nodes_.emplace_back();
    }
    nodes_[known->second] = {layout, cost, parent, std::move(step), false};
    queue_.push({cost + plan::least_cost(model_, problem_, layout), known->second});
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

/// Checks that both layouts are for one mesh, because the search uses dimensions of one layout as
/// indices in the other.
void check_arguments(LayoutPtr from, LayoutPtr to, std::span<const std::int64_t> sizes) {
  TESSERA_CHECK(from->mesh_sizes() == to->mesh_sizes(), "redistribution from ", to_string(*from),
                " to ", to_string(*to),
                " is between different meshes; bring the tensor to one mesh");
  TESSERA_CHECK(from->tensor_ndim() == to->tensor_ndim() &&
                    static_cast<int>(sizes.size()) == to->tensor_ndim(),
                "redistribution from ", to_string(*from), " to ", to_string(*to),
                " is of a tensor with ", sizes.size(), " dimensions");
}

/// The largest tensor dimensions. Sharding a large dimension causes the least padding.
std::vector<int> largest_dims(std::span<const std::int64_t> sizes) {
  std::vector<int> dims(sizes.size());
  std::iota(dims.begin(), dims.end(), 0);
  std::stable_sort(dims.begin(), dims.end(), [&](int a, int b) {
    return sizes[static_cast<std::size_t>(a)] > sizes[static_cast<std::size_t>(b)];
  });
  dims.resize(std::min(dims.size(), kTemporaryDims));
  return dims;
}

/// Adds a relabel step. Layouts that differ only on mesh dimensions of size 1 have the same values,
/// so the tensor only gets the other layout and nothing is sent.
void relabel(std::vector<Step>& steps, LayoutPtr from, LayoutPtr to) {
  if (from != to) {
    steps.push_back({.kind = StepKind::kRelabel, .mesh_dims = {}, .from = from, .to = to});
  }
}

std::int64_t bytes_of(const std::vector<Step>& steps) {
  return std::accumulate(steps.begin(), steps.end(), std::int64_t{0},
                         [](std::int64_t sum, const Step& step) { return sum + step.bytes; });
}

/// The fastest plan, unless a plan without temporary dimensions sends fewer bytes. PyTorch's greedy
/// planner uses no temporary dimensions, so the result never sends more bytes than PyTorch's. By
/// time alone, small tensors would be all-reduced and sliced instead of reduce-scattered twice: one
/// collective less, but more bytes.
std::vector<Step> search(Problem problem, LayoutPtr from, const CostModel& model) {
  // latency only decides between plans that send equally many bytes
  constexpr CostModel kBytesFirst{.latency_us = 1, .bytes_per_us = 1e-3};
  auto fastest = Search(problem, model).run(from);
  // A plan of one step is final, so most redistributions need only one search.
  if (fastest.size() == 1) {
    return fastest;
  }
  problem.temporary_dims.clear();
  auto fewest_bytes = Search(problem, kBytesFirst).run(from);
  return bytes_of(fastest) <= bytes_of(fewest_bytes) ? fastest : fewest_bytes;
}

double cost_of(const CostModel& model, const std::vector<Step>& steps) {
  return std::accumulate(steps.begin(), steps.end(), 0.0, [&](double sum, const Step& step) {
    return sum + plan::step_cost(model, step);
  });
}

}  // namespace

std::int64_t RedistributionPlan::bytes() const {
  return bytes_of(steps);
}

RedistributionPlan plan_redistribution(LayoutPtr from, LayoutPtr to,
                                       std::span<const std::int64_t> sizes, std::int64_t itemsize,
                                       const CostModel& model) {
  check_arguments(from, to, sizes);
  // Mesh dimensions of size 1 are only relabelled, before and after the search.
  const auto start = detail::without_unit_mesh_dims(from);
  const auto end = detail::without_unit_mesh_dims(to);
  RedistributionPlan plan;
  if (start == end) {
    relabel(plan.steps, from, to);
  } else {
    relabel(plan.steps, from, start);
    auto steps = search({end, sizes, itemsize, largest_dims(sizes)}, start, model);
    std::move(steps.begin(), steps.end(), std::back_inserter(plan.steps));
    relabel(plan.steps, end, to);
  }
  plan.cost_us = cost_of(model, plan.steps);
  return plan;
}

namespace {

std::string_view name(StepKind kind) {
  switch (kind) {
    case StepKind::kAllGather:
      return "all-gather";
    case StepKind::kReduceScatter:
      return "reduce-scatter";
    case StepKind::kAllReduce:
      return "all-reduce";
    case StepKind::kAllToAll:
      return "all-to-all";
    case StepKind::kSlice:
      return "slice";
    case StepKind::kMakePartial:
      return "make-partial";
    case StepKind::kRelabel:
      return "relabel";
  }
  return "?";
}

std::string to_string(const Step& step) {
  std::string out(name(step.kind));
  if (step.dim >= 0) {
    out += " dim " + std::to_string(step.dim);
  }
  if (step.to_dim >= 0) {
    out += " to " + std::to_string(step.to_dim);
  }
  for (std::size_t i = 0; i < step.mesh_dims.size(); ++i) {
    out += (i == 0 ? " over m" : ",m") + std::to_string(step.mesh_dims[i]);
  }
  if (plan::is_collective(step.kind)) {
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
