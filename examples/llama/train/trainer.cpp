// A training loop as a user of the library would write it: meta model, parallelize, allocate, fill,
// train. Everything collective is called by all ranks in the same order; only rank 0 prints and
// writes.

#include "examples/llama/train/trainer.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <exception>
#include <filesystem>
#include <utility>

#include "examples/llama/train/setup.h"
#include "tessera/comm/trace.h"

namespace llama {

using namespace tessera;
using Clock = std::chrono::steady_clock;

namespace {

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

Trainer::Trainer(TrainOptions options, comm::WorldPtr world, const ApplyPlan& apply,
                 const StopSignals* signals)
    : options_(std::move(options)),
      world_(std::move(world)),
      observation_(options_),
      signals_(signals) {
  mesh_ = make_mesh(options_, world_);
  // Flat, so that replicas and shards are one group for the mean of the loss.
  data_mesh_ = data_mesh(mesh_).flatten();
  config_ = model_config(options_);
  data_ = open_training_data(options_, config_);
  const DeviceMesh batches = batch_mesh(mesh_).flatten();
  rows_ = options_.batch / batches.size();
  first_row_ = batches.local_rank() * rows_;
  if (data_.loader) {
    prefetch_.emplace(data_.loader, first_row_, first_row_ + rows_, uses_cuda(),
                      /*beside=*/!options_.planned);
  }
  if (!options_.checkpoint.empty() || !options_.initial_load.empty()) {
    checkpoints_ = std::make_unique<Checkpoints>(options_, world_);
  }
  build_model(apply);
  if (!options_.planned) {
    check_same_data(options_, *world_);
  }
  manual_seed(options_.seed);
  if (checkpoints_ && !checkpoints_->source().empty()) {
    checkpoints_->load(state());
  }
  observation_.begin(mesh_, *model_, position_.step);
  // Last: a run that fails before this leaves no empty files.
  prepare_outputs();
}

void Trainer::build_model(const ApplyPlan& apply) {
  const c10::Device device(options_.device);
  model_ = make_model(options_, config_, mesh_, apply);
  fill_model();
  // Offloaded or not, the rotary tables are where the model computes.
  for (const auto& [name, slot] : model_->named_buffer_slots()) {
    slot->swap(slot->get().to(device));
  }
  // Does nothing without TESSERA_COMPARE.
  observe::compare_runs(*model_, mesh_, batch_mesh(mesh_).shape().names());
  parameters_ = optim::slots_of(*model_);
  optimizer_ = make_optimizer(options_, *model_);
  scaler_ = optim::GradScaler({.enabled = options_.param_dtype == "fp16"});
  schedule_.emplace(make_schedule(options_));
}

/// Also where a checkpoint replaces the weights: the optimizer's state is made for filled ones.
void Trainer::fill_model() {
  const bool replaced = checkpoints_ && !checkpoints_->source().empty();
  if (options_.model.empty() || replaced) {
    nn::init_weights(*model_, options_.seed);
  } else {
    nn::init_buffers(*model_);
    checkpoint::load_hugging_face(*model_, *world_, options_.model);
    // Adapters, which are not in the folder.
    nn::init_unfilled(*model_, options_.seed);
  }
  nn::check_initialized(*model_);
}

/// A rank's rows of a batch are consecutive, and so are those of its micro-batches: the batch is
/// the same for any number of ranks.
at::Tensor Trainer::loss_of(const data::BatchLoader::Batch& batch, std::int64_t micro_batch,
                            const tensor_parallel::CrossEntropyOptions& options) {
  const std::int64_t count = rows_ / options_.accumulate;
  return loss_of_rows(*model_, options_, batch.rows(micro_batch * count, count), options);
}

tensor_parallel::CrossEntropyOptions Trainer::loss_of_training() const {
  return {.label_smoothing = options_.label_smoothing, .z_loss = options_.z_loss};
}

/// A copy, because the all-reduce writes it and the caller may still use the loss.
at::Tensor Trainer::mean_over_data(const at::Tensor& value) const {
  at::Tensor mean = value.to(c10::kFloat).clone();
  if (data_mesh_.size() > 1) {
    const comm::CallerScope caller("mean of the loss");
    data_mesh_.group().all_reduce(mean, ReduceOp::kAvg)->wait();
  }
  return mean;
}

at::Tensor Trainer::accumulate_gradients(observe::StepMetrics& metrics) {
  const Clock::time_point start = Clock::now();
  // Before the forward: the host goes on, and has issued all of it before the first kernel ends.
  const data::BatchLoader::Batch batch = tokens_of_rank(
      *model_,
      prefetch_->load(position_.samples / options_.batch).to(c10::Device(options_.device)));
  metrics.data_time_s = seconds_since(start);
  const std::int64_t count = options_.accumulate;
  tensor_parallel::CrossEntropyOptions of_training = loss_of_training();
  // Where ranks and micro-batches count differently many tokens, their sums add up to the mean.
  const bool is_mean = !data_.loader->ignores_targets();
  if (!is_mean) {
    of_training.tokens = tensor_parallel::tokens_per_rank(batch.targets, data_mesh_);
  }
  at::Tensor mean = at::zeros({}, at::device(c10::Device(options_.device)));
  for (std::int64_t i = 0; i < count; ++i) {
    begin_micro_batch(*model_, options_, i);
    const at::Tensor loss = loss_of(batch, i, of_training) / (is_mean ? count : 1);
    scaler_.scale(loss).backward();
    mean += loss.detach();
  }
  return mean;
}

/// One optimizer step, with all that the log and the report need.
observe::StepMetrics Trainer::step() try {
  const Clock::time_point start = Clock::now();
  const comm::TrafficTable before = world_->traffic().table();
  const double lr_factor = schedule_->factor(position_.step);
  optimizer_->scale_lr(lr_factor);

  observe::StepMetrics metrics;
  const at::Tensor loss = accumulate_gradients(metrics);
  const at::Tensor norm = scaler_.clip_grad_norm_(parameters_, options_.clip);
  // Before step(), which may change it.
  const double scale = scaler_.scale();
  const bool stepped = scaler_.step(*optimizer_);
  // Without loss scaling the step's only synchronisation with the device.
  const at::Tensor figures =
      at::stack({mean_over_data(loss).to(norm.device()), norm}).to(c10::kCPU);

  metrics.step = position_.step + 1;
  metrics.checkpoint_stall_s = std::exchange(stall_s_, std::nullopt);
  metrics.loss = figures[0].item<double>();
  metrics.grad_norm = figures[1].item<double>();
  metrics.lr = options_.lr * lr_factor;
  if (scaler_.enabled()) {
    metrics.loss_scale = scale;
  }
  metrics.skipped = !stepped;
  check_finite(metrics);
  // After the check, which looks at the gradients.
  optimizer_->zero_grad();
  ++position_.step;
  position_.samples += options_.batch;
  metrics.step_time_s = seconds_since(start);
  observe::set_memory(metrics, options_.device);
  metrics.comm = world_->traffic().since(before);
  return metrics;
} catch (const c10::Error& error) {
  fail_in_step(error);
}

/// libtorch knows neither the rank nor the unit. Its what() has the stack as well, in pages.
void Trainer::fail_in_step(const c10::Error& error) const {
  const std::string unit = fsdp::under_way(*model_);
  const bool memory = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr;
  fail("step ", position_.step + 1, ", ", unit.empty() ? "outside of forward and backward" : unit,
       ", rank ", world_->rank(), ": ", error.what_without_backtrace(),
       memory ? "; take a smaller --batch, --ac full or more ranks" : "");
}

/// A step that loss scaling has left out may have infinite gradients: that is how it finds its
/// scale.
void Trainer::check_finite(const observe::StepMetrics& metrics) const {
  const bool gradients_served = std::isfinite(metrics.grad_norm) || metrics.skipped;
  if (std::isfinite(metrics.loss) && gradients_served) {
    return;
  }
  // Every rank knows that it happened.
  const std::string found = optim::describe_nonfinite(parameters_);
  fail("step ", metrics.step, ": the loss is ", metrics.loss, " and the gradient norm ",
       metrics.grad_norm, "; ", found.empty() ? "all gradients are finite" : found,
       "; lower --lr or --clip, or look at the data of this step");
}

bool Trainer::run() {
  // A program that is meant to be fast should fail rather than gather something unseen.
  const StrictScope strict;
  if (position_.step < options_.steps) {
    peak_flops_ = peak_flops_of(options_, *world_);
  }
  if (is_main()) {
    progress_ = std::make_unique<observe::Progress>(options_.steps, stdout);
    print_start();
  }
  if (options_.verify) {
    verify();
  }
  const bool trained = train();
  if (trained) {
    swap_averages();  // behind the last checkpoint, which has both
  }
  const bool finished = trained && evaluate_at_end();
  const std::exception_ptr unsaved = save_again_if_failed();
  if (finished) {
    write_outputs();
  }
  if (unsaved) {
    std::rethrow_exception(unsaved);
  }
  return finished;
}

void Trainer::swap_averages() {
  if (auto* ema = dynamic_cast<optim::Ema*>(optimizer_.get())) {
    ema->swap();
  }
}

/// What fails for the second time is not thrown yet: the outputs are whole without a checkpoint.
std::exception_ptr Trainer::save_again_if_failed() {
  if (!checkpoints_ || checkpoints_->settle()) {
    return unsaved_;
  }
  std::exception_ptr unsaved;
  swap_averages();  // only a finished training has a save in the background
  try {
    save_checkpoint(true);
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error&) {
    unsaved = std::current_exception();
  }
  swap_averages();
  return unsaved;
}

bool Trainer::train() {
  const observe::ModelFlops flops = flops_of(config_, options_.seq);
  bool stopped = told_to_stop();  // while it was made and loaded
  while (position_.step < options_.steps && !stopped) {
    observe::StepMetrics metrics =
        observation_.run(position_.step + 1, *model_, *optimizer_, [this] { return step(); });
    observe::set_throughput(metrics, options_.batch * options_.seq, world_->size(), flops,
                            peak_flops_);
    stopped = !evaluate_if_due(metrics);
    if (is_main()) {
      log(metrics);
    }
    stopped = stopped || told_to_stop();
    if (!stopped && position_.step == options_.steps) {
      save_last();
    } else if (stopped || (checkpoints_ && checkpoints_->is_due(position_.step))) {
      save_checkpoint(stopped);
    }
  }
  note_last_stall();
  observation_.end(*world_);
  return !stopped;
}

/// There is no step after it.
void Trainer::note_last_stall() {
  if (!stall_s_ || history_.empty()) {
    return;
  }
  std::optional<double>& stall = history_.back().checkpoint_stall_s;
  stall = stall.value_or(0) + *std::exchange(stall_s_, std::nullopt);
  if (writer_) {
    writer_->write_again(history_.back());
  }
}

void Trainer::save_checkpoint(bool stopped) {
  if (options_.checkpoint.empty()) {
    return;
  }
  stall_s_ = stopped ? checkpoints_->save_at_once(state()) : checkpoints_->save(state());
  if (stall_s_ && is_main()) {
    progress_->line(fmt::format("checkpoint: {} ({:.2f} s)",
                                checkpoints_->folder(position_.step).string(), *stall_s_));
  }
}

/// What it fails with is thrown behind the outputs.
void Trainer::save_last() {
  try {
    save_checkpoint(false);
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error&) {
    unsaved_ = std::current_exception();
  }
}

bool Trainer::told_to_stop() {
  if (signals_ == nullptr) {
    return false;
  }
  // Between the hosts: a device is not waited for.
  std::array<std::uint8_t, 1> told{static_cast<std::uint8_t>(signals_->received())};
  if (mesh_.size() > 1) {
    mesh_.flatten().group().any_rank(told);
  }
  if (told[0] != 0 && is_main()) {
    progress_->line(
        position_.step == 0
            ? "told to stop before the first step; start it again"
            : fmt::format("told to stop after step {}; --resume goes on", position_.step));
  }
  return told[0] != 0;
}

}  // namespace llama
