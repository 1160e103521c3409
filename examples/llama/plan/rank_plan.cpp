// A step on paper with who follows its memory and its time.

#include "examples/llama/plan/rank_plan.h"

#include <memory>
#include <string>
#include <utility>

#include "examples/llama/scalar_type.h"
#include "examples/llama/train/setup.h"
#include "tessera/comm/fake_world.h"
#include "tessera/comm/streams.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/kernels/fake_mode.h"

namespace llama {

using namespace tessera;

namespace {

/// Of libtorch's allocator on a GPU.
constexpr std::int64_t kGpuGranularity = 512;

/// The lanes of a rank on paper: on a GPU with time, on a CPU without, as there.
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

/// So that the log knows parameters from what a forward keeps.
void assign_parameters(observe::MemoryLog& log, const Llama& model) {
  for (const auto& [name, slot] : model.named_slots()) {
    const at::Tensor& tensor = slot->persistent();
    log.assign(is_distributed(tensor) ? local_tensor(tensor) : tensor, /*owner=*/"");
  }
}

}  // namespace

void set_speed(observe::StepMetrics& metrics, const TrainOptions& options, const Machine& machine,
               const Config& config) {
  observe::set_throughput(metrics, options.batch * options.seq, static_cast<int>(options.ranks()),
                          flops_of(config, options.seq),
                          machine.peak_flops(scalar_type(options.param_dtype)));
}

RankPlan plan_rank(const TrainOptions& options, const std::optional<Machine>& machine, int rank,
                   std::vector<RankKind>* kinds) {
  const bool on_gpu = options.device == "cuda";
  Schedule schedule(machine, /*lanes=*/on_gpu);
  observe::MemoryLog log({.reserve_only = true, .granularity = on_gpu ? kGpuGranularity : 1});
  const HostStreamsScope streams(log.memory_lanes(std::make_shared<PlannedStreams>(schedule)));
  const kernels::FakeMode fake(
      on_gpu ? c10::DeviceType::CUDA : c10::DeviceType::CPU,
      [&](const kernels::FakeCall& call) { schedule.run(call, log.phase()); });
  const auto start = [&](const comm::FakeCollective& call) { return schedule.start(call); };
  PlannedRun run(options, comm::fake_world(rank, static_cast<int>(options.ranks()), start));
  const auto where = [&] { return run.under_way(); };
  // The first step makes the optimizer's state; the second is like all others.
  log.begin_step(where);
  run.step();
  assign_parameters(log, run.model());
  log.begin_step(where, /*moments=*/true);
  schedule.begin_step();
  RankPlan plan{.coordinate = run.coordinate(), .metrics = run.step()};
  plan.memory = log.use(/*on_host=*/on_gpu && options.offload);
  if (machine) {
    plan.time = schedule.time();
    plan.metrics.step_time_s = plan.time->total;
    set_speed(plan.metrics, options, *machine, run.config());
  }
  if (kinds != nullptr) {
    *kinds = run.kinds();
  }
  return plan;
}

std::vector<RankPlan> plan_run(const TrainOptions& options, const std::optional<Machine>& machine) {
  TESSERA_CHECK(options.ranks() <= (1 << 24), "a plan of ", options.ranks(),
                " ranks; plan at most ", 1 << 24);
  std::vector<RankKind> kinds;
  std::vector<RankPlan> plans{plan_rank(options, machine, 0, &kinds)};
  plans.front().kind = kinds.front();
  for (std::size_t i = 1; i < kinds.size(); ++i) {
    plans.push_back(plan_rank(options, machine, kinds[i].first));
    plans.back().kind = kinds[i];
  }
  return plans;
}

}  // namespace llama
