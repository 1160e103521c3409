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
#include "tessera/observe/memory.h"
#include "tessera/observe/metrics.h"
#include "tessera/optim/optimizer.h"
#include "tessera/planning/machine.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// An interval of a step, in seconds from its begin.
struct Span {
  /// "operators" of the compute lane, "waiting" there, or the mesh dimension of a collective.
  std::string row;
  std::string what;  ///< the phase of operators, the cause of waiting, or the collective
  double begin = 0, end = 0;
};

/// All calls of one operator in a step, on any lane.
struct OperatorUse {
  std::int64_t calls = 0;
  double bytes = 0;  ///< of its tensors, read and written
  double flops = 0;  ///< for a product, else 0
  double seconds = 0;
};

/// The time of a step, in seconds.
struct StepTime {
  double total = 0;
  double compute = 0;  ///< operators of the compute lane, without waiting
  /// How long the compute lane waits for collectives, by mesh dimension.
  std::map<std::string, double> exposed;
  std::map<std::string, double> communication;     ///< of all collectives, by mesh dimension
  double flops = 0;                                ///< for all products, those computed again too
  std::vector<Span> spans;                         ///< operators of a phase without a gap are one
  std::map<std::string, OperatorUse> operators{};  ///< by name: "aten::mm"
};

/// One rank's part of a training.
struct Run {
  /// Parallelized, with memory for this rank's shards.
  std::shared_ptr<nn::ModuleBase> model{};
  DeviceMesh mesh{};             ///< all ranks
  std::function<void()> step{};  ///< one training step, with the optimizer's
  /// Sizes, other than those of shards, in which ranks may differ: for a coordinate in the mesh,
  /// such as the length of its part of each sequence. Empty: none.
  std::function<std::vector<std::int64_t>(const std::vector<std::int64_t>& coordinate)> sizes{};
};
/// Makes this rank's run in a world, which is fake for a plan.
using MakeRun = std::function<Run(const comm::WorldPtr& world)>;

/// The machine, and what figures refer to.
struct PlanOptions {
  std::optional<Machine> machine{};  ///< without one no time is estimated
  /// The device of the training: "cpu" or "cuda". While it is planned, its tensors are on the CPU.
  std::string device = "cpu";
  bool offload = false;     ///< on a GPU: shards, gradients and optimizer are in the host's memory
  std::int64_t tokens = 0;  ///< or samples, in a step, over all ranks
  c10::ScalarType type = c10::kFloat;  ///< of products, for their peak FLOP/s
  /// The model's FLOPs per token, for MFU; zeros: those of the step's products, recomputation
  /// included.
  observe::ModelFlops flops{};
  /// Advice on what makes memory of a kind smaller, if a plan does not fit; empty: a general one.
  std::function<std::string(observe::MemoryKind)> remedy{};
  /// Sizes in which ranks differ, for a coordinate in the mesh, besides those of shards: the rows
  /// of a rank's batch, for example. Used if Run::sizes is empty. Without either, plan_run() plans
  /// the last rank of each kind too, and throws Error if it differs from the first.
  std::function<std::vector<std::int64_t>(const std::vector<std::int64_t>& coordinate)> sizes{};
  /// What operators return whose sizes depend on values, by name. An even routing to experts:
  ///   {{"aten::nonzero", [](const kernels::FakeCall& call) -> std::vector<at::Tensor> {
  ///      return {at::arange(call.inputs[0].size(0) / kExperts).unsqueeze(1)};
  ///    }}}
  std::map<std::string, kernels::FakeRule> data_dependent{};
  /// For plan(); empty: AdamW.
  std::function<std::unique_ptr<optim::Optimizer>(const nn::ModuleBase& model)> optimizer{};
};

/// Ranks that have equal sizes of everything.
struct RankKind {
  int first = 0;           ///< the first rank of the kind
  int last = 0;            ///< and the last one
  std::int64_t count = 0;  ///< ranks of it
};

/// The step of a rank of one kind.
struct RankPlan {
  RankKind kind{};
  std::vector<std::int64_t> coordinate{};  ///< of the first rank in the mesh
  observe::StepMemory memory{};
  std::optional<StepTime> time{};  ///< on a machine
  /// comm, and with a machine also step_time_s, tokens_per_s, tflops and mfu.
  observe::StepMetrics metrics{};
};

/// The step of all ranks of a training.
struct RunPlan {
  PlanOptions options{};
  MeshShape mesh{};
  std::vector<RankPlan> ranks{};  ///< one of each kind

  /// The rank with the highest peak.
  const RankPlan& largest() const;
  /// Whether tensors of the kind are in the host's memory, not in the device's.
  bool on_host(observe::MemoryKind kind) const;
  /// Whether the largest fits a device of the machine; true without one.
  bool fits() const;
};

/// Plans the second step of a training: one rank of each kind, one after the other, in a
/// comm::fake_world and a kernels::FakeMode, with memory that is only reserved. One at a time in a
/// process. Throws Error for more than 2^24 ranks, and what `make` and the step throw.
RunPlan plan_run(const MakeRun& make, std::int64_t ranks, const PlanOptions& options);
/// One rank alone.
RankPlan plan_rank(const MakeRun& make, std::int64_t ranks, int rank, const PlanOptions& options);
/// Computes tokens_per_s, tflops and mfu from step_time_s. `products`: FLOPs of a rank's products,
/// used if the options have no FLOPs of the model.
void set_speed(observe::StepMetrics& metrics, std::int64_t ranks, double products,
               const PlanOptions& options);

namespace detail {

/// A plan can't be made for more: groups have lists of their ranks.
inline constexpr std::int64_t kMostRanks = 1 << 24;

void allocate(nn::ModuleBase& model);
std::shared_ptr<optim::Optimizer> make_optimizer(const PlanOptions& options,
                                                 const nn::ModuleBase& model);

}  // namespace detail

/// plan_run() of a model and a step of its training. `factory(mesh)` makes the model on the meta
/// device (nn::MetaDevice) and parallelizes it; it returns a std::shared_ptr. `step(model,
/// optimizer, mesh)` makes one step: forward, loss, backward, clipping, the optimizer's step and
/// zero_grad(). Tensors that it makes have no values.
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
