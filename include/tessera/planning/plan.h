#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/world.h"
#include "tessera/core/mesh_shape.h"
#include "tessera/export.h"
#include "tessera/kernels/fake_mode.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"
#include "tessera/observe/detail/memory.h"
#include "tessera/observe/metrics.h"
#include "tessera/optim/optimizer.h"
#include "tessera/planning/detail/step_time.h"
#include "tessera/planning/machine.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// One rank's part of a training run. plan_run() executes this part.
struct Run {
  /// The parallelized model, in which this rank's shards are allocated (not on the meta device).
  std::shared_ptr<nn::ModuleBase> model{};
  DeviceMesh mesh{};             ///< the mesh of all ranks
  std::function<void()> step{};  ///< function that runs one training step with the optimizer step
};
/// A function that makes this rank's Run. During planning, `world` is a comm::fake_world.
using MakeRun = std::function<Run(const comm::WorldPtr& world)>;

/// Options of plan() and plan_run().
struct PlanOptions {
  std::optional<Machine> machine{};  ///< the machine to plan for; nullopt: no time is estimated
  /// The device of the training run: "cpu" or "cuda". During planning, all tensors are on the CPU.
  std::string device = "cpu";
  bool offload = false;     ///< whether shards, gradients and optimizer state are in CPU memory
  std::int64_t tokens = 0;  ///< number of tokens (or samples) per step over all ranks
  c10::ScalarType type = c10::kFloat;  ///< dtype of the matrix products, for their peak FLOP/s
  /// The model's FLOPs per token, for model FLOPs utilization (MFU). If zero, MFU uses the FLOPs of
  /// the step's matrix products, including recomputation.
  observe::ModelFlops flops{};
  /// A function that returns advice on how to reduce memory of a MemoryKind, for a run that does
  /// not fit. If the function is empty, the advice is general.
  std::function<std::string(observe::MemoryKind)> remedy{};
  /// Returns numbers that determine tensor sizes on the rank at `coordinate`, such as the number of
  /// samples. Ranks with equal numbers and equal shard sizes form a RankKind. If empty, plan_run()
  /// also plans the last rank of each RankKind, and throws Error if the two plans differ.
  std::function<std::vector<std::int64_t>(const std::vector<std::int64_t>& coordinate)> sizes{};
  /// Results of operators whose result sizes depend on values, by operator name. For balanced
  /// experts:
  ///   {{"aten::nonzero", [](const kernels::FakeCall& call) -> std::vector<at::Tensor> {
  ///     return {at::arange(call.inputs[0].size(0) / kExperts).unsqueeze(1)};
  ///   }}}
  std::map<std::string, kernels::FakeRule> data_dependent{};
  /// Creates the optimizer for plan(). If the function is empty, plan() uses AdamW.
  std::function<std::unique_ptr<optim::Optimizer>(const nn::ModuleBase& model)> optimizer{};
};

/// The memory and time of a training step on one rank, equal for all ranks of the same RankKind.
struct RankPlan {
  RankKind kind{};
  std::vector<std::int64_t> coordinate{};  ///< mesh coordinate of the first rank of the RankKind
  observe::StepMemory memory{};
  std::optional<StepTime> time{};  ///< the time of the step; nullopt without PlanOptions::machine
  /// The estimated metrics: comm and, with a machine, step_time_s, tokens_per_s, tflops and mfu.
  /// Other fields are not set.
  observe::StepMetrics metrics{};
};

/// The memory and time of a training step, for all ranks of a run.
struct RunPlan {
  PlanOptions options{};
  MeshShape mesh{};
  std::vector<RankPlan> ranks{};  ///< the plans: of one rank for each RankKind

  /// Returns the plan of the rank with the highest memory peak.
  const RankPlan& largest() const;
  /// Whether tensors of kind `kind` are in CPU memory instead of device memory.
  bool on_host(observe::MemoryKind kind) const;
  /// Whether the memory peak of every rank fits a device of the machine; true without a machine.
  bool fits() const;
};

/// Estimates memory and time of a run's second step, for one rank of each RankKind, without real
/// memory. Only one call at a time per process. Throws Error for more than 2^24 ranks, and the
/// exceptions of `make` and of the step.
RunPlan plan_run(const MakeRun& make, std::int64_t ranks, const PlanOptions& options);

namespace detail {

/// The largest number of ranks that can be planned. The number is limited because every process
/// group stores a list of its ranks.
inline constexpr std::int64_t kMostRanks = 1 << 24;

/// Like plan_run(), but estimates memory and time on the given rank only.
RankPlan plan_rank(const MakeRun& make, std::int64_t ranks, int rank, const PlanOptions& options);

void allocate(nn::ModuleBase& model);
std::shared_ptr<optim::Optimizer> make_optimizer(const PlanOptions& options,
                                                 const nn::ModuleBase& model);

}  // namespace detail

/// Calls plan_run() for a model and its training step. `factory(mesh)` creates the model on the
/// meta device, parallelizes it and returns a std::shared_ptr. `step(model, optimizer, mesh)` runs
/// a whole step, including the update and zero_grad(). Tensors have sizes but no values.
///
///   const MeshShape mesh({2, 2}, {"dp", "tp"});
///   const planning::PlanOptions options{.machine = planning::machine_of("h100")};
///   std::cout << planning::to_text(planning::plan(make_mlp, train_step, mesh, options));
template <class Factory, class Step>
RunPlan plan(const Factory& factory, const Step& step, const MeshShape& mesh,
             const PlanOptions& options = {}) {
  const auto make = [&](const comm::WorldPtr& world) {
    const DeviceMesh ranks = init_device_mesh(world, mesh.sizes(), mesh.names());
    const auto model = factory(ranks);
    detail::allocate(*model);
    const auto optimizer = detail::make_optimizer(options, *model);
    return Run{model, ranks, [=, &step] { step(*model, *optimizer, ranks); }};
  };
  return plan_run(make, mesh.numel(), options);
}

}  // namespace tessera::planning
TESSERA_API_END
