#include "tessera/training/step.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <vector>

#include "tessera/comm/trace.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/optim/clip_grad.h"

namespace tessera::training {

/// A copy, because the all-reduce writes it and the caller may still use the value.
at::Tensor mean_over(const at::Tensor& value, const DeviceMesh& mesh) {
  at::Tensor mean = value.to(c10::kFloat).clone();
  if (mesh.size() > 1) {
    const comm::CallerScope caller("mean of the loss");
    mesh.group().all_reduce(mean, ReduceOp::kAvg)->wait();
  }
  return mean;
}

namespace {

void begin_micro_batch(nn::ModuleBase& model, const StepOptions& options, std::int64_t i) {
  if (options.sync_each_micro_batch) {
    return;
  }
  const bool last = i + 1 == options.accumulate;
  fsdp::set_reshard_after_backward(model, last);
  fsdp::set_requires_gradient_sync(model, last);
}

/// Returns the loss of this rank.
at::Tensor accumulate_gradients(TrainState& state, const StepOptions& options,
                                const LossFunction& loss_of) {
  const double divisor =
      options.mean_of_micro_batches ? static_cast<double>(options.accumulate) : 1;
  at::Tensor sum;
  for (std::int64_t i = 0; i < options.accumulate; ++i) {
    begin_micro_batch(state.model, options, i);
    const at::Tensor loss = loss_of(i) / divisor;
    state.scaler.scale(loss).backward();
    const at::Tensor value =
        is_distributed(loss) ? DistributedTensor(loss.detach()).full_tensor() : loss.detach();
    if (!sum.defined()) {
      sum = at::zeros({}, at::device(value.device()));
    }
    sum += value;
  }
  return sum;
}

/// A step that loss scaling has left out may have infinite gradients: that is how it finds its
/// scale. Every rank knows that the step failed.
void check_finite(const StepResult& result, std::int64_t step, const StepOptions& options,
                  const std::vector<nn::SlotPtr>& parameters) {
  if (std::isfinite(result.loss) && (std::isfinite(result.grad_norm) || result.skipped)) {
    return;
  }
  const std::string found = optim::describe_nonfinite(parameters);
  fail("step ", step, ": the loss is ", result.loss, " and the gradient norm ", result.grad_norm,
       "; ", found.empty() ? "all gradients are finite" : found, "; ", options.advice_not_finite);
}

/// libtorch knows neither the rank nor the unit. Its what() has the stack as well, in pages.
[[noreturn]] void fail_in_step(const c10::Error& error, const TrainState& state, int rank,
                               const StepOptions& options) {
  const std::string unit = fsdp::under_way(state.model);
  const bool memory = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr;
  fail("step ", state.step + 1, ", ", unit.empty() ? "outside of forward and backward" : unit,
       ", rank ", rank, ": ", error.what_without_backtrace(),
       memory ? "; " + options.advice_out_of_memory : "");
}

}  // namespace

StepResult step(TrainState& state, const DeviceMesh& data_mesh, const StepOptions& options,
                const LossFunction& loss_of) try {
  StepResult result;
  result.lr_factor = options.schedule ? options.schedule->factor(state.step) : 1;
  state.optimizer.scale_lr(result.lr_factor);

  const std::vector<nn::SlotPtr> parameters = optim::slots_of(state.model);
  const at::Tensor loss = accumulate_gradients(state, options, loss_of);
  // Before the step, which may change it.
  if (state.scaler.enabled()) {
    result.loss_scale = state.scaler.scale();
  }
  const auto [norm, stepped] =
      state.scaler.clip_and_step(state.optimizer, parameters, options.max_norm);
  result.skipped = !stepped;
  // Without loss scaling the step's only synchronisation with the device.
  const at::Tensor figures =
      at::stack({mean_over(loss, data_mesh).to(norm.device()), norm}).to(c10::kCPU);
  result.loss = figures[0].item<double>();
  result.grad_norm = figures[1].item<double>();
  check_finite(result, state.step + 1, options, parameters);
  // After the check, which looks at the gradients.
  state.optimizer.zero_grad();
  ++state.step;
  state.samples += options.batch;
  return result;
} catch (const c10::Error& error) {
  fail_in_step(error, state, data_mesh.world()->rank(), options);
}

}  // namespace tessera::training
