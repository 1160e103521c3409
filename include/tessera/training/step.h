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
#include "tessera/optim/optimizer.h"

TESSERA_API_BEGIN
namespace tessera::training {

/// The state of training, which a Checkpointer saves and loads.
///
///   training::TrainState state{*model, optimizer};
struct TrainState {
  nn::ModuleBase& model;
  optim::Optimizer& optimizer;
  /// The gradient scaler for fp16 training; off by default.
  optim::GradScaler scaler = optim::GradScaler({.enabled = false});
  std::int64_t step = 0;     ///< number of optimizer steps so far
  std::int64_t samples = 0;  ///< number of samples of all steps so far, over all ranks
};

/// Options of step().
struct StepOptions {
  std::int64_t batch = 1;       ///< number of samples per step, over all ranks
  std::int64_t accumulate = 1;  ///< number of micro-batches, each with a forward and a backward
  /// If true, `loss` returns the mean over a micro-batch, and the step's loss is the mean of these
  /// losses. If false, losses are already divided by the number of tokens of all micro-batches
  /// (tensor_parallel::tokens_per_rank), and the step's loss is the sum of these losses.
  bool mean_of_micro_batches = true;
  /// Whether FSDP reduces gradients after each micro-batch. If false, a step has one all-gather and
  /// one reduction; parameters remain gathered. False requires reshard_after_forward = false
  /// (ZeRO-2).
  bool sync_each_micro_batch = true;
  double max_norm = 1.0;  ///< maximum norm of the gradients; infinity: no clipping
  /// The learning-rate schedule; nullopt: a constant learning rate.
  std::optional<optim::LrSchedule> schedule = std::nullopt;
  /// Advice that is added to the error of a step whose loss or gradient norm is NaN or infinite.
  std::string advice_not_finite =
      "lower the learning rate or max_norm, or look at the data of this step";
  std::string advice_out_of_memory = "take a smaller batch, activation checkpointing or more ranks";
};

/// The result of one call of step().
struct StepResult {
  double loss = 0;       ///< the step's loss, averaged over the ranks of data_mesh
  double grad_norm = 0;  ///< gradient norm of the whole model, before clipping
  double lr_factor = 1;  ///< factor of the learning-rate schedule in this step
  std::optional<double> loss_scale = std::nullopt;  ///< loss scale of fp16 training, if any
  bool skipped = false;  ///< whether the update was skipped because a gradient overflowed
};

/// Returns the loss of this rank's part of micro-batch `i` of a step: a scalar, plain or
/// distributed.
using LossFunction = std::function<at::Tensor(std::int64_t i)>;

/// Runs one optimizer step: forward and backward of each micro-batch, clipping, the update at the
/// schedule's learning rate, and zero_grad(). Then increments state.step.
///
///   const auto loss = [&](std::int64_t) { return at::mse_loss((*model)(x), y); };
///   const training::StepResult result = training::step(state, mesh["dp"], {.batch = 32}, loss);
///
/// `data_mesh`: all mesh dimensions whose ranks have different data. The norm is over the gradients
/// of the model and the optimizer. Collective over the model's meshes. Throws Error on every rank
/// for a NaN or infinite loss or norm, and for a model without a parameter on `data_mesh`. A
/// libtorch exception on one rank becomes an Error on that rank.
///
/// A step that throws clears all gradients and is not counted. After a NaN or infinite value,
/// parameters on a CPU are unchanged. On a GPU, parameters may be updated: load a checkpoint.
StepResult step(TrainState& state, const DeviceMesh& data_mesh, const StepOptions& options,
                const LossFunction& loss);

/// Returns the mean of a scalar over the ranks of a mesh, in fp32, without gradient. A distributed
/// scalar is gathered first. Collective over `mesh`. Throws Error for a tensor with several
/// elements.
at::Tensor mean_over(const at::Tensor& value, const DeviceMesh& mesh);

/// Measures the time, the communication and the memory of a step.
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
  /// `device`: the type of the device that is measured, "cpu" or "cuda".
  StepMeter(comm::WorldPtr world, std::string device);
  void begin();
  /// To be called when the batch is available: the time since begin() counts as waiting for data.
  void data_ready();
  /// Returns all metrics except the throughput (see observe::set_throughput). `lr` is the step's
  /// learning rate.
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

/// Returns the mean loss of held-out batches 0 to `batches` - 1, in eval mode and without
/// gradients. `loss` returns the plain scalar loss of this rank's part of a batch. `stop` is called
/// after each batch, and must be equal on all ranks; true ends the evaluation with nullopt.
/// Collective over `data_mesh` (see step()) and the meshes of `loss`. Throws Error if `batches` is
/// 0.
std::optional<double> evaluate(nn::ModuleBase& model, const DeviceMesh& data_mesh,
                               std::int64_t batches,
                               const std::function<at::Tensor(std::int64_t batch)>& loss,
                               const std::function<bool()>& stop = {});

/// Runs `body` with the averaged weights if the optimizer is an optim::Ema, else with the current
/// weights. The current weights are restored afterwards, even if `body` throws.
void with_averaged_weights(optim::Optimizer& optimizer, const std::function<void()>& body);

}  // namespace tessera::training
TESSERA_API_END
