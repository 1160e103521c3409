// A rank's step in a fake world, followed by its memory log and its schedule. What the training
// does, its plan says: the code is the same.

#include "tessera/planning/plan.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "plan/kinds.h"
#include "plan/most_ranks.h"
#include "schedule/schedule.h"
#include "tessera/comm/fake_world.h"
#include "tessera/comm/streams.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/fsdp/detail/active_units.h"
#include "tessera/kernels/fake_mode.h"
#include "tessera/nn/initialization.h"
#include "tessera/optim/adamw.h"

namespace tessera::planning {

namespace {

/// Bytes that libtorch's allocator rounds to on a GPU.
constexpr std::int64_t kGpuGranularity = 512;

/// The lanes of a rank that is planned: on a GPU with time, on a CPU without, as there.
class PlannedStreams final : public comm::Streams {
 public:
  explicit PlannedStreams(Schedule& schedule) : schedule_(schedule) {}
  comm::StreamEventPtr record(comm::Lane lane) override { return schedule_.record(lane); }
  void wait(comm::Lane lane, const comm::StreamEventPtr& event) override {
    schedule_.wait(lane, event);
  }
  void synchronize(const comm::StreamEventPtr& event) override {
    schedule_.wait(comm::Lane::kCompute, event);
  }

 private:
  void enter(comm::Lane lane) override { schedule_.enter(lane); }
  void leave() override { schedule_.leave(); }

  Schedule& schedule_;
};

/// Within a scope the CPU has these lanes.
class HostStreamsScope {
 public:
  explicit HostStreamsScope(comm::StreamsPtr streams) {
    comm::set_host_streams(std::move(streams));
  }
  HostStreamsScope(const HostStreamsScope&) = delete;
  HostStreamsScope& operator=(const HostStreamsScope&) = delete;
  ~HostStreamsScope() { comm::set_host_streams(nullptr); }
};

/// What is still computed, on integers, is small: threads would only wait for it.
class OneThread {
 public:
  OneThread() : before_(at::get_num_threads()) { at::set_num_threads(1); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
  ~OneThread() { at::set_num_threads(before_); }

 private:
  int before_;
};

/// So that the log knows parameters from what a forward keeps.
void assign_parameters(observe::MemoryLog& log, const nn::ModuleBase& model) {
  for (const auto& [name, slot] : model.named_slots()) {
    log.assign(local_tensor(slot->persistent()), /*module=*/"");
  }
}

/// A plan, and what only one of all ranks is asked.
struct PlannedRank {
  RankPlan plan;
  std::vector<RankKind> kinds;
  MeshShape mesh;
};

PlannedRank plan_one(const MakeRun& make, std::int64_t ranks, int rank, const PlanOptions& options,
                     bool with_kinds) {
  const OneThread threads;
  const bool on_gpu = options.device == "cuda";
  Schedule schedule(options.machine, /*lanes=*/on_gpu);
  observe::MemoryLog log({.reserve_only = true, .granularity = on_gpu ? kGpuGranularity : 1});
  const HostStreamsScope streams(log.memory_lanes(std::make_shared<PlannedStreams>(schedule)));
  const kernels::FakeMode fake(
      on_gpu ? c10::DeviceType::CUDA : c10::DeviceType::CPU,
      [&](const kernels::FakeCall& call) { schedule.run(call, log.phase()); });
  const auto start = [&](const comm::FakeCollective& call) { return schedule.start(call); };
  const comm::WorldPtr world = comm::fake_world(rank, static_cast<int>(ranks), start);
  const Run run = make(world);
  const fsdp::ActiveUnits units(*run.model);
  const auto where = [&] { return units.text(); };
  // The first step makes the optimizer's state; the second is like all others.
  log.begin_step(where);
  run.step();
  assign_parameters(log, *run.model);
  log.begin_step(where, /*moments=*/true);
  schedule.begin_step();
  const comm::TrafficTable before = world->traffic().table();
  run.step();
  RankPlan plan{.coordinate = run.mesh.coordinate()};
  plan.metrics.comm = world->traffic().since(before);
  plan.memory = log.use(/*on_host=*/on_gpu && options.offload);
  if (options.machine) {
    plan.time = schedule.time();
    plan.metrics.step_time_s = plan.time->total;
    set_speed(plan.metrics, ranks, plan.time->flops, options);
  }
  return {std::move(plan), with_kinds ? kinds_of(run) : std::vector<RankKind>{}, run.mesh.shape()};
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

RankPlan plan_rank(const MakeRun& make, std::int64_t ranks, int rank, const PlanOptions& options) {
  return plan_one(make, ranks, rank, options, /*with_kinds=*/false).plan;
}

RunPlan plan_run(const MakeRun& make, std::int64_t ranks, const PlanOptions& options) {
  TESSERA_CHECK(ranks <= kMostRanks, "a plan of ", ranks, " ranks; plan at most ", kMostRanks);
  PlannedRank first = plan_one(make, ranks, 0, options, /*with_kinds=*/true);
  first.plan.kind = first.kinds.front();
  RunPlan plan{.options = options, .mesh = first.mesh, .ranks = {std::move(first.plan)}};
  for (std::size_t i = 1; i < first.kinds.size(); ++i) {
    plan.ranks.push_back(plan_rank(make, ranks, first.kinds[i].first, options));
    plan.ranks.back().kind = first.kinds[i];
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
