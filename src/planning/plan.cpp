// Plans a rank's step in a comm::fake_world: records memory (MemoryLog) and time (Schedule).
#include "tessera/planning/plan.h"
#include "tessera/comm/detail/scopes.h"
#include "tessera/observe/detail/memory.h"

#include <ATen/Parallel.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>

#include "schedule.h"
#include "tessera/comm/detail/streams.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/fsdp/detail/active_units.h"
#include "tessera/kernels/fake_mode.h"
#include "tessera/nn/initialization.h"
#include "tessera/optim/adamw.h"

namespace tessera::planning {

namespace {

using Coordinate = std::vector<std::int64_t>;

/// Converts a rank's coordinate in the root mesh to the rank's coordinate in the submesh `mesh`. A
/// flattened dimension of `mesh` consists of several dimensions of the root mesh.
class Submesh {
 public:
  Submesh(const DeviceMesh& mesh, const MeshShape& root)
      : steps_(static_cast<std::size_t>(root.ndim())),
        ndim_(static_cast<std::size_t>(mesh.shape().ndim())) {
    const Coordinate begin = root.coordinate(mesh.ranks().front());
    for (std::size_t dim = 0; dim < steps_.size(); ++dim) {
      Coordinate next = begin;
      ++next[dim];
      if (next[dim] < root.size(static_cast<int>(dim))) {
        const auto found = std::ranges::find(mesh.ranks(), root.index(next));
        steps_[dim] = found == mesh.ranks().end()
                          ? Coordinate()
                          : mesh.shape().coordinate(found - mesh.ranks().begin());
      }
    }
  }

  Coordinate of(const Coordinate& in_root) const {
    Coordinate coordinate(ndim_);
    for (std::size_t dim = 0; dim < steps_.size(); ++dim) {
      for (std::size_t i = 0; i < steps_[dim].size(); ++i) {
        coordinate[i] += steps_[dim][i] * in_root[dim];
      }
    }
    return coordinate;
  }

 private:
  /// For each dimension of the root mesh: how the submesh coordinate changes if the root coordinate
  /// grows by 1; empty if the next rank is outside of the submesh.
  std::vector<Coordinate> steps_;
  std::size_t ndim_;
};

/// A parameter's layout and sizes, and the submesh of the layout.
struct Place {
  const ShardingSpec* spec;
  Coordinate sizes;
  Submesh submesh;
};

/// Returns one Place for all parameters of equal layout and sizes, because their shards have equal
/// sizes on every rank.
std::vector<Place> places_of(const Run& run) {
  std::vector<Place> places;
  std::set<std::tuple<const void*, const void*, Coordinate>> seen;
  for (const auto& [name, slot] : run.model->named_slots()) {
    const at::Tensor& tensor = slot->persistent();
    if (!is_distributed(tensor)) {
      continue;
    }
    const ShardingSpec& spec = sharding_spec(tensor);
    if (seen.emplace(&*spec.layout, spec.mesh.id(), tensor.sizes().vec()).second) {
      places.push_back({&spec, tensor.sizes().vec(), Submesh(spec.mesh, run.mesh.shape())});
    }
  }
  return places;
}

/// Puts ranks with equal shard sizes and equal PlanOptions::sizes into one group (RankKind). The
/// groups are sorted by their first rank.
std::vector<RankKind> kinds_of(const Run& run, const PlanOptions& options) {
  std::map<std::vector<std::int64_t>, RankKind> by_sizes;
  const MeshShape& root = run.mesh.shape();
  const std::vector<Place> places = places_of(run);
  for (int rank = 0; rank < root.numel(); ++rank) {
    const Coordinate coordinate = root.coordinate(rank);
    std::vector<std::int64_t> sizes;
    if (options.sizes) {
      sizes = options.sizes(coordinate);
    }
    for (const Place& place : places) {
      sizes.push_back(local_numel(*place.spec->layout, place.sizes, place.submesh.of(coordinate)));
    }
    const auto [kind, is_new] = by_sizes.try_emplace(std::move(sizes));
    kind->second.first = is_new ? rank : kind->second.first;
    kind->second.last = rank;
    ++kind->second.count;
  }
  std::vector<RankKind> kinds;
  for (const auto& [sizes, kind] : by_sizes) {
    kinds.push_back(kind);
  }
  std::ranges::sort(kinds, {}, &RankKind::first);
  return kinds;
}

/// libtorch's allocation granularity on a GPU, in bytes.
constexpr std::int64_t kGpuGranularity = 512;

struct PlannedRank {
  RankPlan plan;
  std::vector<RankKind> kinds;
  MeshShape mesh;
};

PlannedRank plan_one(const MakeRun& make, std::int64_t ranks, int rank, const PlanOptions& options,
                     bool with_kinds) {
  // One thread is enough, because a FakeMode computes only the values of small integer operators.
  const auto restore =
      c10::make_scope_exit([before = at::get_num_threads()] { at::set_num_threads(before); });
  at::set_num_threads(1);
  const bool on_gpu = options.device == "cuda";
  const auto schedule = std::make_shared<Schedule>(options.machine, /*lanes=*/on_gpu);
  observe::MemoryLog log({.reserve_only = true, .granularity = on_gpu ? kGpuGranularity : 1});
  comm::set_host_streams(log.memory_lanes(schedule));
  const auto streams = c10::make_scope_exit([] { comm::set_host_streams(nullptr); });
  const kernels::FakeMode fake(
      on_gpu ? c10::DeviceType::CUDA : c10::DeviceType::CPU,
      [&](const kernels::FakeCall& call) { schedule->run(call, log.phase()); },
      options.data_dependent);
  const auto start = [&](const comm::FakeCollective& call) { return schedule->start(call); };
  const comm::WorldPtr world = comm::fake_world(rank, static_cast<int>(ranks), start);
  const Run run = make(world);
  const fsdp::ActiveUnits units(*run.model);
  const auto where = [&] { return units.text(); };
  // Plans the second step, because the first step also allocates the state of the optimizer.
  log.begin_step(where);
  run.step();
  for (const auto& [name, slot] : run.model->named_slots()) {
    log.assign_parameter(local_tensor(slot->persistent()));
  }
  log.begin_step(where, /*moments=*/true);
  schedule->begin_step();
  const comm::TrafficTable before = world->traffic().table();
  run.step();
  RankPlan plan{.coordinate = run.mesh.coordinate()};
  plan.metrics.comm = world->traffic().since(before);
  plan.memory = log.use(/*on_host=*/on_gpu && options.offload);
  if (options.machine) {
    plan.time = schedule->time();
    plan.metrics.step_time_s = plan.time->total;
    set_speed(plan.metrics, ranks, plan.time->flops, options);
  }
  return {std::move(plan), with_kinds ? kinds_of(run, options) : std::vector<RankKind>{},
          run.mesh.shape()};
}

}  // namespace

namespace detail {

void allocate(nn::ModuleBase& model) {
  nn::to_empty(model, at::kCPU);
  nn::init_weights(model, /*seed=*/0);
}

std::shared_ptr<optim::Optimizer> make_optimizer(const PlanOptions& options,
                                                 const nn::ModuleBase& model) {
  if (options.optimizer) {
    return options.optimizer(model);
  }
  return std::make_shared<optim::AdamW>(model, optim::AdamWOptions{});
}

}  // namespace detail

void set_speed(observe::StepMetrics& metrics, std::int64_t ranks, double products,
               const PlanOptions& options) {
  observe::ModelFlops flops = options.flops;
  if (flops.per_token == 0 && options.tokens > 0) {
    const double per_token =
        products * static_cast<double>(ranks) / static_cast<double>(options.tokens);
    flops = {per_token, per_token};
  }
  observe::set_throughput(metrics, options.tokens, static_cast<int>(ranks), flops,
                          options.machine->peak_flops(options.type));
}

RankPlan detail::plan_rank(const MakeRun& make, std::int64_t ranks, int rank,
                           const PlanOptions& options) {
  return plan_one(make, ranks, rank, options, /*with_kinds=*/false).plan;
}

namespace {

/// Throws Error unless the first and the last rank of a RankKind have equal memory peaks and sent
/// bytes. The ranks differ, for example, if a batch cannot be divided evenly.
void check_kind(const RankPlan& plan, const RankPlan& last) {
  const auto traffic = [](const RankPlan& rank) { return comm::total(rank.metrics.comm); };
  const auto text = [&](const RankPlan& rank) {
    return fmt::format("a peak of {} bytes and {} bytes sent", rank.memory.peak_bytes,
                       traffic(rank).bytes);
  };
  TESSERA_CHECK(plan.memory.peak_bytes == last.memory.peak_bytes &&
                    traffic(plan).bytes == traffic(last).bytes,
                "planning: ranks ", plan.kind.first, " and ", plan.kind.last,
                " have shards of equal sizes, but their steps differ: ", text(plan), " on rank ",
                plan.kind.first, ", ", text(last), " on rank ", plan.kind.last,
                "; make PlanOptions::sizes return the sizes that differ, such as a batch's rows");
}

}  // namespace

RunPlan plan_run(const MakeRun& make, std::int64_t ranks, const PlanOptions& options) {
  TESSERA_CHECK(ranks <= detail::kMostRanks, "a plan of ", ranks,
                " ranks is too large; plan at most ", detail::kMostRanks, " ranks");
  PlannedRank first = plan_one(make, ranks, 0, options, /*with_kinds=*/true);
  RunPlan plan{.options = options, .mesh = first.mesh, .ranks = {}};
  for (const RankKind& kind : first.kinds) {
    plan.ranks.push_back(kind.first == 0 ? std::move(first.plan)
                                         : detail::plan_rank(make, ranks, kind.first, options));
    plan.ranks.back().kind = kind;
    if (!options.sizes && kind.last > kind.first) {
      check_kind(plan.ranks.back(), detail::plan_rank(make, ranks, kind.last, options));
    }
  }
  return plan;
}

const RankPlan& RunPlan::largest() const {
  return *std::ranges::max_element(ranks, {},
                                   [](const RankPlan& rank) { return rank.memory.peak_bytes; });
}

bool RunPlan::on_host(observe::MemoryKind kind) const {
  return options.device == "cuda" && options.offload && is_state(kind);
}

bool RunPlan::fits() const {
  return !options.machine || largest().memory.peak_bytes <= options.machine->room();
}

}  // namespace tessera::planning
