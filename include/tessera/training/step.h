#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "tessera/comm/trace.h"
#include "tessera/comm/world.h"
#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"
#include "tessera/observe/metrics.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/lr_schedule.h"
#include "tessera/optim/optimizer.h"

TESSERA_API_BEGIN
namespace tessera::training {

/// The state of training, which a Checkpointer saves and loads.
///
///   training::TrainState state{*model, optimizer};
struct TrainState {
  nn::ModuleBase& model;
  optim::Optimizer& optimizer;
  /// The loss scaling of fp16; off by default.
  optim::GradScaler scaler = optim::GradScaler({.enabled = false});
  std::int64_t step = 0;     ///< optimizer steps so far
  std::int64_t samples = 0;  ///< samples of these steps, on all ranks together
};

/// Options of a step.
struct StepOptions {
  std::int64_t batch = 1;       ///< samples of a step, on all ranks together
  std::int64_t accumulate = 1;  ///< micro-batches, each with a forward and a backward
  /// True: the loss function returns the mean of a micro-batch, and the step's loss is the mean
  /// over micro-batches. False: the step's loss is the sum over micro-batches, for tokens that are
  /// counted over all of them (tensor_parallel::tokens_per_rank).
  bool mean_of_micro_batches = true;
  /// False, for FSDP with reshard_after_forward false (ZeRO-2): parameters stay gathered, and
  /// gradients unreduced, until the last micro-batch: one gather and one reduction a step.
  bool sync_each_micro_batch = true;
  double max_norm = 1.0;  ///< of the gradients; infinity: no limit
  std::optional<optim::LrSchedule> schedule = std::nullopt;  ///< none: a constant rate
  /// Advice in the messages of a failed step.
  std::string advice_not_finite =
      "lower the learning rate or max_norm, or look at the data of this step";
  std::string advice_out_of_memory = "take a smaller batch, activation checkpointing or more ranks";
};

/// The result of a step.
struct StepResult {
  double loss = 0;       ///< mean over the ranks of data_mesh and the micro-batches
  double grad_norm = 0;  ///< of the whole model, before clipping
  double lr_factor = 1;  ///< the schedule's factor of the rate
  std::optional<double> loss_scale = std::nullopt;  ///< of the step; nullopt without loss scaling
  bool skipped = false;                             ///< no update, because a gradient overflowed
};

/// The loss of this rank's part of micro-batch `i` of a step: a scalar, plain or distributed.
using LossFunction = std::function<at::Tensor(std::int64_t i)>;

/// Makes one optimizer step: forward and backward of each micro-batch, clipping, the update at the
/// schedule's rate, and no gradients afterwards. Then the state is one step further.
///
///   const auto loss = [&](std::int64_t) { return at::mse_loss((*model)(x), y); };
///   const training::StepResult result = training::step(state, mesh["dp"], {.batch = 32}, loss);
///
/// `data_mesh`: the ranks that hold different data, all dimensions of it. Collective over the
/// model's meshes. Throws Error on every rank for a loss or gradient norm that is not finite, with
/// the parameter; an error of libtorch's on one rank becomes an Error there, with the step, the
/// FSDP unit and the rank. Also on every rank for a model without a parameter on `data_mesh`, whose
/// gradients would not be summed.
///
/// The norm is over the gradients of all parameters of the model, and of others that the optimizer
/// updates. A step drops all gradients, also if it throws; then it is not counted. After a loss or
/// norm that is not finite, parameters on a CPU are unchanged. On a GPU, where the host waits once
/// a step, they were updated: load a checkpoint.
StepResult step(TrainState& state, const DeviceMesh& data_mesh, const StepOptions& options,
                const LossFunction& loss);

/// The mean of a scalar over the ranks of a mesh, in fp32, without gradient. A distributed scalar
/// is taken whole, which is collective over its own mesh, too. Collective over `mesh`. Throws Error
/// for a tensor of more elements.
at::Tensor mean_over(const at::Tensor& value, const DeviceMesh& mesh);

/// Measures a step: its time, what it sends, and its memory.
///
///   meter.begin();
///   const Batch batch = loader.load(state.step);
///   meter.data_ready();
///   const training::StepResult result = training::step(state, mesh, options, loss);
///   const observe::StepMetrics metrics = meter.end(state, result, lr * result.lr_factor);
///
/// Not collective.
class StepMeter {
 public:
  /// `device`: "cpu" or "cuda".
  StepMeter(comm::WorldPtr world, std::string device);
  void begin();
  /// The batch is there: what has passed counts as the wait for data.
  void data_ready();
  /// The metrics but for the throughput (observe::set_throughput). `lr`: the step's rate.
  observe::StepMetrics end(const TrainState& state, const StepResult& result, double lr);

 private:
  using Clock = std::chrono::steady_clock;

  double seconds() const;

  comm::WorldPtr world_;
  std::string device_;
  Clock::time_point start_;
  double data_time_s_ = 0;
  comm::TrafficTable before_;
};

/// When a run evaluates held-out data.
struct EvaluationOptions {
  std::int64_t every = 0;  ///< steps; 0: not between the steps
  std::int64_t steps = 0;  ///< of the whole run: the last one is evaluated, too
  bool is_due(std::int64_t step) const { return every > 0 && (step % every == 0 || step == steps); }
};

/// The mean loss of held-out batches 0 to `batches` - 1, without gradients and with the model in
/// eval mode; afterwards the model is as it was. `loss`: of this rank's part of a batch, a plain
/// scalar. `stop`: asked after each batch, the same on all ranks, as stop_requested(); nullopt if
/// it says so. Collective as `loss` and over `data_mesh`, as step() takes it. Throws Error for no
/// batch.
std::optional<double> evaluate(nn::ModuleBase& model, const DeviceMesh& data_mesh,
                               std::int64_t batches,
                               const std::function<at::Tensor(std::int64_t batch)>& loss,
                               const std::function<bool()>& stop = {});

/// Runs `body` with the averages of an optim::Ema as the weights, and with the weights as they are
/// where the optimizer is another. Also where `body` throws, the weights are back afterwards.
void with_averaged_weights(optim::Optimizer& optimizer, const std::function<void()>& body);

}  // namespace tessera::training
TESSERA_API_END
