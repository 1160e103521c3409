// Performs one training step, computes the metrics of the step, and evaluates a model.

#include "tessera/training/step.h"
#include "tessera/observe/detail/metrics_output.h"
#include "tessera/optim/clip_grad.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tessera/comm/detail/recording.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/detail/slots.h"

namespace tessera::training {
namespace {

/// Returns a loss as a plain tensor without a graph. With loss parallelism, the loss is a
/// distributed tensor on the tensor-parallel ranks.
at::Tensor value_of(const at::Tensor& loss) {
  const at::Tensor value = loss.detach();
  return is_distributed(value) ? DistributedTensor(value).full_tensor() : value;
}

}  // namespace

at::Tensor mean_over(const at::Tensor& value, const DeviceMesh& mesh) {
  TESSERA_CHECK(value.defined() && !value.is_meta(), "mean_over was called with a tensor ",
                value.defined() ? "on the meta device" : "that is undefined",
                "; pass a scalar tensor with a value");
  TESSERA_CHECK(value.numel() == 1, "mean_over was called with a tensor of sizes ", value.sizes(),
                "; pass a scalar, for example the mean of a loss");
  // The loss is cloned, because the all-reduce overwrites its tensor in place and the caller may
  // still use the loss.
  at::Tensor mean = value_of(value).to(c10::kFloat).clone();
  if (mesh.size() > 1) {
    const comm::CallerScope caller("mean of the loss");
    mesh.group_of_all_ranks().all_reduce(mean, ReduceOp::kAvg)->wait();
  }
  return mean;
}

namespace {

void check(const TrainState& state, const StepOptions& options, const LossFunction& loss_of) {
  TESSERA_CHECK(options.accumulate > 0 && options.batch > 0, "step ", state.step + 1,
                ": accumulate is ", options.accumulate, " and batch ", options.batch,
                "; both must be 1 or more");
  TESSERA_CHECK(loss_of != nullptr, "step ", state.step + 1,
                ": the loss function is empty; pass a function that returns a micro-batch's loss");
}

/// Whether the parameter is distributed over at least two ranks of `data_mesh`, so that its
/// gradient is reduced over these ranks.
bool spans(const at::Tensor& parameter, const DeviceMesh& data_mesh) {
  if (!is_distributed(parameter)) {
    return false;
  }
  const std::vector<int>& ranks = sharding_spec(parameter).mesh.ranks();
  int shared = 0;
  for (const int rank : data_mesh.ranks()) {
    shared += std::ranges::find(ranks, rank) == ranks.end() ? 0 : 1;
    if (shared > 1) {
      return true;
    }
  }
  return false;
}

/// Throws Error if no gradient is reduced over `data_mesh`, because each rank would then train its
/// own model. The result is the same on every rank, without communication.
void check_gradients_are_summed(const TrainState& state, const DeviceMesh& data_mesh,
                                const std::vector<nn::SlotPtr>& parameters) {
  if (data_mesh.size() == 1) {
    return;
  }
  std::int64_t trained = 0;
  for (const nn::SlotPtr& slot : parameters) {
    if (slot->persistent().requires_grad()) {
      ++trained;
      if (spans(slot->persistent(), data_mesh)) {
        return;
      }
    }
  }
  TESSERA_CHECK(trained == 0, "step ", state.step + 1, ": none of the ", trained,
                " trained parameters of a ", state.model.name(), " is on ", to_string(data_mesh),
                " of ", data_mesh.size(), " ranks, so the gradients would not be reduced; ",
                "apply fsdp::fully_shard or fsdp::replicate to the model");
}

void begin_micro_batch(nn::ModuleBase& model, const StepOptions& options, std::int64_t i) {
  if (options.sync_each_micro_batch) {
    return;
  }
  const bool last = i + 1 == options.accumulate;
  fsdp::set_reshard_after_backward(model, last);
  fsdp::set_requires_gradient_sync(model, last);
}

/// Checks the loss before backward, because libtorch's error messages would mention neither the
/// step nor the loss.
void check_loss(const at::Tensor& loss, const TrainState& state, std::int64_t i) {
  const auto refuse = [&](const auto&... found) {
    fail("step ", state.step + 1, ": the loss of micro-batch ", i, found...,
         "; return the mean over the micro-batch's samples, a scalar that requires a gradient");
  };
  if (!loss.defined()) {
    refuse(" is an undefined tensor");
  }
  if (loss.dim() != 0) {
    refuse(" has the sizes ", loss.sizes());
  }
  if (loss.is_meta()) {
    refuse(" is on the meta device: the model uses a tensor that was made under nn::MetaDevice");
  }
  if (!loss.requires_grad()) {
    refuse(" depends on no trained parameter, or was detached");
  }
}

at::Tensor accumulate_gradients(TrainState& state, const StepOptions& options,
                                const LossFunction& loss_of) {
  const double divisor =
      options.mean_of_micro_batches ? static_cast<double>(options.accumulate) : 1;
  at::Tensor sum;
  for (std::int64_t i = 0; i < options.accumulate; ++i) {
    begin_micro_batch(state.model, options, i);
    const at::Tensor own = loss_of(i);
    check_loss(own, state, i);
    const at::Tensor loss = own / divisor;
    state.scaler.scale(loss).backward();
    const at::Tensor value = value_of(loss);
    if (!sum.defined()) {
      sum = at::zeros({}, at::device(value.device()));
    }
    sum += value;
  }
  return sum;
}

/// Throws Error on every rank if the loss or the gradient norm is NaN or infinite. Steps that loss
/// scaling has skipped because of infinite gradients are no error.
void check_finite(const StepResult& result, std::int64_t step, const StepOptions& options,
                  const std::vector<nn::SlotPtr>& parameters) {
  if (std::isfinite(result.loss) && (std::isfinite(result.grad_norm) || result.skipped)) {
    return;
  }
  std::string found = optim::detail::describe_nonfinite(parameters);
  if (found.empty()) {
    found = "all gradients are finite";
    found += std::isnan(result.loss) ? ", so the loss may be a mean over no samples" : "";
  }
  fail("step ", step, ": the loss is ", result.loss, " and the gradient norm ", result.grad_norm,
       "; ", found, "; ", options.advice_not_finite);
}

/// Converts a libtorch exception to an Error with the step, the FSDP unit and the rank, and without
/// a stack trace.
[[noreturn]] void fail_in_step(const c10::Error& error, const TrainState& state, int rank,
                               const StepOptions& options) {
  const std::string unit = fsdp::current_unit(state.model);
  const bool memory = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr;
  fail("step ", state.step + 1, ", ", unit.empty() ? "outside of forward and backward" : unit,
       ", rank ", rank, ": ", error.what_without_backtrace(),
       memory ? "; " + options.advice_out_of_memory : "");
}

/// Updates the parameters, and checks the loss and the gradient norm for NaN and infinity. On a CPU
/// the check comes first, so that a failed step changes no parameter. On a GPU the check comes
/// last, so that the host waits only once; AdamW's kernels change nothing if the norm is not
/// finite.
void update(TrainState& state, const DeviceMesh& data_mesh, const StepOptions& options,
            const std::vector<nn::SlotPtr>& parameters, const at::Tensor& loss,
            StepResult& result) {
  bool is_checked = false;
  const auto check_figures = [&](const at::Tensor& norm) {
    const at::Tensor figures =
        at::stack({mean_over(loss, data_mesh).to(norm.device()), norm}).to(c10::kCPU);
    result.loss = figures[0].item<double>();
    result.grad_norm = figures[1].item<double>();
    check_finite(result, state.step + 1, options, parameters);
    is_checked = true;
  };
  if (state.scaler.enabled()) {
    /// The loss scale is read before the optimizer step, which can change the loss scale.
    result.loss_scale = state.scaler.scale();
  }
  const auto [norm, stepped] = state.scaler.clip_and_step(
      state.optimizer, parameters, options.max_norm, [&check_figures](const at::Tensor& before) {
        if (before.is_cpu()) {
          check_figures(before);
        }
      });
  result.skipped = !stepped;
  if (!is_checked) {
    check_figures(norm);
  }
}

std::vector<nn::SlotPtr> parameters_of(const TrainState& state) {
  std::vector<nn::SlotPtr> parameters = optim::slots_of(state.model);
  const std::unordered_set<nn::SlotPtr> known(parameters.begin(), parameters.end());
  for (const nn::SlotPtr& slot : state.optimizer.parameters()) {
    if (!known.contains(slot)) {
      parameters.push_back(slot);
    }
  }
  return parameters;
}

void drop_gradients(const std::vector<nn::SlotPtr>& parameters) {
  for (const nn::SlotPtr& slot : parameters) {
    nn::drop_gradient(*slot);
  }
}

/// Drops the gradients of a failed step, so that the next step does not add to these gradients.
void clean_up(TrainState& state, const StepOptions& options,
              const std::vector<nn::SlotPtr>& parameters) {
  drop_gradients(parameters);
  if (!options.sync_each_micro_batch) {
    fsdp::set_reshard_after_backward(state.model, true);
    fsdp::set_requires_gradient_sync(state.model, true);
  }
}

StepResult make_step(TrainState& state, const DeviceMesh& data_mesh, const StepOptions& options,
                     const std::vector<nn::SlotPtr>& parameters, const LossFunction& loss_of) try {
  StepResult result;
  result.lr_factor = options.schedule ? options.schedule->factor(state.step) : 1;
  state.optimizer.scale_lr(result.lr_factor);
  const at::Tensor loss = accumulate_gradients(state, options, loss_of);
  update(state, data_mesh, options, parameters, loss, result);
  // Gradients are dropped after update(), because the checks in update() read the gradients.
  drop_gradients(parameters);
  ++state.step;
  state.samples += options.batch;
  return result;
} catch (...) {
  clean_up(state, options, parameters);
  throw;
}

}  // namespace

StepResult step(TrainState& state, const DeviceMesh& data_mesh, const StepOptions& options,
                const LossFunction& loss_of) try {
  check(state, options, loss_of);
  const std::vector<nn::SlotPtr> parameters = parameters_of(state);
  check_gradients_are_summed(state, data_mesh, parameters);
  return make_step(state, data_mesh, options, parameters, loss_of);
} catch (const c10::Error& error) {
  fail_in_step(error, state, data_mesh.world()->rank(), options);
}

StepMeter::StepMeter(comm::WorldPtr world, std::string device)
    : world_(std::move(world)), device_(std::move(device)) {}

double StepMeter::seconds() const {
  return std::chrono::duration<double>(Clock::now() - start_).count();
}

void StepMeter::begin() {
  start_ = Clock::now();
  data_time_s_ = 0;
  before_ = world_->traffic().table();
}

void StepMeter::data_ready() {
  data_time_s_ = seconds();
}

observe::StepMetrics StepMeter::end(const TrainState& state, const StepResult& result, double lr) {
  observe::StepMetrics metrics;
  metrics.step = state.step;
  metrics.loss = result.loss;
  metrics.grad_norm = result.grad_norm;
  metrics.lr = lr;
  metrics.loss_scale = result.loss_scale;
  metrics.skipped = result.skipped;
  metrics.data_time_s = data_time_s_;
  metrics.step_time_s = seconds();
  observe::set_memory(metrics, device_);
  metrics.comm = world_->traffic().since(before_);
  return metrics;
}

std::optional<double> evaluate(nn::ModuleBase& model, const DeviceMesh& data_mesh,
                               std::int64_t batches,
                               const std::function<at::Tensor(std::int64_t batch)>& loss,
                               const std::function<bool()>& stop) {
  TESSERA_CHECK(batches > 0, "evaluate: batches is ", batches, "; pass 1 or more");
  const c10::NoGradGuard no_grad;
  const auto restore =
      c10::make_scope_exit([&model, trains = model.is_training()] { model.train(trains); });
  model.eval();
  double sum = 0;
  for (std::int64_t i = 0; i < batches; ++i) {
    sum += mean_over(loss(i), data_mesh).item<double>();
    if (stop && stop()) {
      return std::nullopt;
    }
  }
  return sum / static_cast<double>(batches);
}

void with_averaged_weights(optim::Optimizer& optimizer, const std::function<void()>& body) {
  auto* const ema = dynamic_cast<optim::Ema*>(&optimizer);
  if (ema == nullptr) {
    body();
    return;
  }
  ema->swap();
  const auto restore = c10::make_scope_exit([ema] { ema->swap(); });
  body();
}

}  // namespace tessera::training
