#include "tessera/training/step.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>
#include <vector>

#include "tessera/comm/trace.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/detail/slot_keeper.h"
#include "tessera/optim/clip_grad.h"

namespace tessera::training {

/// A copy, because the all-reduce writes it and the caller may still use the value.
at::Tensor mean_over(const at::Tensor& value, const DeviceMesh& mesh) {
  at::Tensor mean = value.to(c10::kFloat).clone();
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
                "; a step has 1 micro-batch or more, of 1 sample or more");
  TESSERA_CHECK(loss_of != nullptr, "step ", state.step + 1,
                ": the loss function is empty; pass one that returns a micro-batch's loss");
}

/// Whether FSDP or a plan has put the parameter on a mesh with two of these ranks or more, whose
/// gradients are summed there.
bool spans(const at::Tensor& parameter, const DeviceMesh& data_mesh) {
  if (!is_distributed(parameter)) {
    return false;
  }
  const std::vector<int>& ranks = sharding_spec(parameter).mesh.ranks();
  int shared = 0;
  for (const int rank : data_mesh.ranks()) {
    shared += std::ranges::find(ranks, rank) == ranks.end() ? 0 : 1;
    if (shared > 1) {
      return true;  // the first ones are near the beginning, also of a mesh of thousands
    }
  }
  return false;
}

/// Each rank would train a model of its own. The same on every rank: no communication.
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
                " of ", data_mesh.size(), " ranks, so that their gradients would not be summed; ",
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

/// libtorch's own messages name neither the step nor the loss.
void check_loss(const at::Tensor& loss, const TrainState& state, std::int64_t i) {
  const auto refuse = [&](const auto&... found) {
    fail("step ", state.step + 1, ": the loss of micro-batch ", i, found...,
         "; return the mean over its samples, a scalar that backward can start from");
  };
  if (!loss.defined()) {
    refuse(" is an undefined tensor");
  }
  if (loss.dim() != 0) {
    refuse(" has the sizes ", loss.sizes());
  }
  if (!loss.requires_grad()) {
    refuse(" depends on no trained parameter, or was detached");
  }
}

/// Returns the loss of this rank.
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
  std::string found = optim::describe_nonfinite(parameters);
  if (found.empty()) {
    found = "all gradients are finite";
    found += std::isnan(result.loss) ? ", as for a mean over no samples" : "";
  }
  fail("step ", step, ": the loss is ", result.loss, " and the gradient norm ", result.grad_norm,
       "; ", found, "; ", options.advice_not_finite);
}

/// libtorch knows neither the rank nor the unit. Its what() has the stack as well, in pages.
[[noreturn]] void fail_in_step(const c10::Error& error, const TrainState& state, int rank,
                               const StepOptions& options) {
  const std::string unit = fsdp::current_unit(state.model);
  const bool memory = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr;
  fail("step ", state.step + 1, ", ", unit.empty() ? "outside of forward and backward" : unit,
       ", rank ", rank, ": ", error.what_without_backtrace(),
       memory ? "; " + options.advice_out_of_memory : "");
}

/// Waits for the device.
void read_figures(const at::Tensor& loss, const at::Tensor& norm, const DeviceMesh& data_mesh,
                  StepResult& result) {
  const at::Tensor figures =
      at::stack({mean_over(loss, data_mesh).to(norm.device()), norm}).to(c10::kCPU);
  result.loss = figures[0].item<double>();
  result.grad_norm = figures[1].item<double>();
}

/// Where the norm is on a GPU, the figures are looked at after the update, so that the host waits
/// once a step; on a CPU before it, which a step that is not finite then does not make.
void update(TrainState& state, const DeviceMesh& data_mesh, const StepOptions& options,
            const std::vector<nn::SlotPtr>& parameters, const at::Tensor& loss,
            StepResult& result) {
  bool is_checked = false;
  const auto check_figures = [&](const at::Tensor& norm) {
    read_figures(loss, norm, data_mesh, result);
    check_finite(result, state.step + 1, options, parameters);
    is_checked = true;
  };
  if (state.scaler.enabled()) {
    result.loss_scale = state.scaler.scale();  // before the step, which may change it
  }
  const auto [norm, stepped] =
      state.scaler.clip_and_step(state.optimizer, parameters, options.max_norm, {},
                                 [&check_figures](const at::Tensor& before) {
                                   if (before.is_cpu()) {
                                     check_figures(before);
                                   }
                                 });
  result.skipped = !stepped;
  if (!is_checked) {
    check_figures(norm);
  }
}

/// Those of the model, trained or not, and what else the optimizer updates.
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

/// What a step that throws has left must not be part of the next one.
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
  // After the checks, which look at the gradients.
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

}  // namespace tessera::training
