#include "tessera/core/redistribute_plan.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <unordered_map>

#include "plan/moves.h"
#include "plan/place.h"
#include "plan/step_cost.h"
#include "tessera/core/error.h"
#include "without_unit_mesh_dims.h"

namespace tessera {
namespace {

using plan::Place;
using plan::Problem;

/// At most this many tensor dimensions serve as parking.
constexpr std::size_t kParkingDims = 2;

/// A* over layouts; ties go to the first found, so that all ranks find the same plan.
class Search {
 public:
  Search(const Problem& problem, const CostModel& model) : problem_(problem), model_(model) {}

  std::vector<Step> run(LayoutPtr from) {
    reach(from, 0, kNone, {});
    while (!queue_.empty()) {
      const auto [estimate, number] = queue_.top();
      queue_.pop();
      if (nodes_[number].layout == problem_.to) return steps_to(number);
      if (!nodes_[number].done) expand(number);
    }
    fail("no sequence of collectives leads from ", to_string(*from), " to ",
         to_string(*problem_.to));
  }

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  struct Node {
    LayoutPtr layout = nullptr;
    double cost = 0;
    std::size_t parent = kNone;
    Step step;
    bool done = false;
  };
  struct Entry {
    double estimate = 0;
    std::size_t number = 0;
    friend bool operator<(const Entry& a, const Entry& b) {  // the queue's top is its largest
      return a.estimate != b.estimate ? a.estimate > b.estimate : a.number > b.number;
    }
  };

  void expand(std::size_t number) {
    nodes_[number].done = true;
    const Place place(problem_, nodes_[number].layout);
    proposed_.clear();
    for (const auto move : plan::kMoves) move(place, proposed_);
    for (auto& step : proposed_) {
      step.bytes = plan::step_bytes(problem_, step);
      const auto cost = nodes_[number].cost + plan::step_cost(model_, step);
      const auto to = step.to;
      reach(to, cost, number, std::move(step));
    }
  }

  void reach(LayoutPtr layout, double cost, std::size_t parent, Step step) {
    const auto [known, fresh] = numbers_.try_emplace(layout, nodes_.size());
    if (!fresh && nodes_[known->second].cost <= cost) return;
    if (fresh) nodes_.emplace_back();
    nodes_[known->second] = {layout, cost, parent, std::move(step), false};
    queue_.push({cost + plan::least_cost(model_, Place(problem_, layout)), known->second});
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

void check_arguments(LayoutPtr from, LayoutPtr to, std::span<const std::int64_t> sizes) {
  TESSERA_CHECK(from->mesh_sizes() == to->mesh_sizes(), "redistribution from ", to_string(*from),
                " to ", to_string(*to),
                " is between different meshes; bring the tensor to one mesh");
  TESSERA_CHECK(from->tensor_ndim() == to->tensor_ndim() &&
                    static_cast<int>(sizes.size()) == to->tensor_ndim(),
                "redistribution from ", to_string(*from), " to ", to_string(*to),
                " is of a tensor with ", sizes.size(), " dimensions");
}

/// The largest dimensions: they hold a shard most evenly.
std::vector<int> parking_dims(std::span<const std::int64_t> sizes) {
  std::vector<int> dims(sizes.size());
  std::iota(dims.begin(), dims.end(), 0);
  std::stable_sort(dims.begin(), dims.end(), [&](int a, int b) {
    return sizes[static_cast<std::size_t>(a)] > sizes[static_cast<std::size_t>(b)];
  });
  dims.resize(std::min(dims.size(), kParkingDims));
  return dims;
}

void relabel(std::vector<Step>& steps, LayoutPtr from, LayoutPtr to) {
  if (from != to)
    steps.push_back({.kind = StepKind::kRelabel, .mesh_dims = {}, .from = from, .to = to});
}

std::int64_t bytes_of(const std::vector<Step>& steps) {
  return std::accumulate(steps.begin(), steps.end(), std::int64_t{0},
                         [](std::int64_t sum, const Step& step) { return sum + step.bytes; });
}

/// The quickest plan that sends no more bytes than the thriftiest direct one, that is, one without
/// parking. PyTorch's greedy plans are direct, so its bytes are never exceeded; where time alone
/// would have it, a tensor reduced whole and then sliced is one collective less but more bytes.
std::vector<Step> search(Problem problem, LayoutPtr from, const CostModel& model) {
  constexpr CostModel kBytesFirst{.latency_us = 1, .bytes_per_us = 1e-3};
  auto quickest = Search(problem, model).run(from);
  if (quickest.size() == 1) return quickest;
  problem.parking.clear();
  auto thriftiest = Search(problem, kBytesFirst).run(from);
  return bytes_of(quickest) <= bytes_of(thriftiest) ? quickest : thriftiest;
}

double cost_of(const CostModel& model, const std::vector<Step>& steps) {
  return std::accumulate(steps.begin(), steps.end(), 0.0, [&](double sum, const Step& step) {
    return sum + plan::step_cost(model, step);
  });
}

}  // namespace

std::int64_t Plan::bytes() const {
  return bytes_of(steps);
}

Plan plan_redistribution(LayoutPtr from, LayoutPtr to, std::span<const std::int64_t> sizes,
                         std::int64_t itemsize, const CostModel& model) {
  check_arguments(from, to, sizes);
  const auto start = detail::without_unit_mesh_dims(from);
  const auto end = detail::without_unit_mesh_dims(to);
  Plan plan;
  if (start == end) {
    relabel(plan.steps, from, to);
  } else {
    relabel(plan.steps, from, start);
    auto steps = search({end, sizes, itemsize, parking_dims(sizes)}, start, model);
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
  if (step.dim >= 0) out += " dim " + std::to_string(step.dim);
  if (step.to_dim >= 0) out += " to " + std::to_string(step.to_dim);
  for (std::size_t i = 0; i < step.mesh_dims.size(); ++i) {
    out += (i == 0 ? " over m" : ",m") + std::to_string(step.mesh_dims[i]);
  }
  if (plan::is_collective(step.kind)) out += ", " + std::to_string(step.bytes) + " bytes";
  return out + ": " + to_string(*step.from) + " -> " + to_string(*step.to);
}

}  // namespace

std::string to_string(const Plan& plan) {
  std::string out;
  for (const auto& step : plan.steps) out += to_string(step) + "\n";
  return out;
}

}  // namespace tessera
