// Trains a Llama on a mesh of dp_replicate x dp x cp x tp ranks. train(), the last function in this
// file, is the whole run. LlamaRun is the model and its training step; run.h creates mesh, model
// and optimizer from the flags; all other parts are in the library (docs/training.md). All
// ranks make all collective calls in the same order; only rank 0 prints and writes.

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "examples/llama/start.h"
#include "examples/llama/train/run.h"
#include "tessera/core/process.h"
#include "tessera/training/checkpointer.h"
#include "tessera/training/recording.h"
#include "tessera/training/step.h"

namespace llama {

using namespace tessera;

namespace {

const training::RunNames kNames{.program = "llama_train", .dashes = "--"};

training::CheckpointOptions checkpoint_options(const TrainOptions& o) {
  training::Resume resume = training::Resume::kNever;
  if (!o.resume.empty()) {
    resume = o.resume == "auto" ? training::Resume::kAuto : training::Resume::kNewest;
  }
  return {.folder = o.checkpoint,
          .every = o.checkpoint_every,
          .steps = o.steps,
          .async = o.async,
          .keep = o.keep,
          .resume = resume,
          .resume_step = o.resume_step,
          .initial_load = o.initial_load,
          .exclude = o.exclude,
          .names = kNames};
}

training::StepRange step_range(const std::string& text) {
  if (text.empty()) {
    return {};
  }
  const auto [first, last] = parse_step_range(text);
  return {first, last};
}

training::RecordingOptions recording_options(const TrainOptions& o) {
  return {.profile = o.profile,
          .profile_steps = step_range(o.profile_steps),
          .steps = o.steps,
          .device = o.device,
          .names = kNames};
}

training::MetricOptions metric_options(const TrainOptions& o) {
  return {.metrics = o.metrics,
          .tensorboard = o.tensorboard,
          .steps = o.steps,
          .log_every = o.log_every,
          .device = o.device};
}

/// A run with its checkpointer, metrics and recordings.
struct RunParts {
  LlamaRun& run;
  training::Recording& recording;
  training::Checkpointer& checkpoints;
  training::MetricLog& log;
  const StopSignals* signals;
  nlohmann::json entries;               ///< non-tensor state that checkpoints save
  std::optional<double> held_out = {};  ///< loss on held-out data with the weights after the last
                                        ///< step
};

/// Whether any rank received a signal; the log reports the signal once. Collective.
bool stop_if_asked(const RunParts& parts) {
  const bool stopped = parts.signals != nullptr &&
                       training::stop_requested(parts.signals->received(), parts.run.mesh);
  if (!stopped) {
    return false;
  }
  const std::int64_t step = parts.run.state.step;
  parts.log.line(step == 0 ? "stopped before the first step; start it again"
                           : fmt::format("stopped after step {}; --resume continues", step));
  return true;
}

void evaluate(RunParts& parts) {
  training::with_averaged_weights(*parts.run.optimizer, [&parts] {
    parts.held_out = held_out_loss(parts.run, [&parts] { return stop_if_asked(parts); });
  });
}

/// Evaluates after a step if --eval-every requests it. Model and random number state do not change.
/// Returns false if a signal stopped the evaluation.
bool evaluate_if_due(RunParts& parts, observe::StepMetrics& metrics) {
  const TrainOptions& options = parts.run.options;
  const training::EvaluationOptions due{.every = options.eval_every, .steps = options.steps};
  parts.held_out.reset();
  if (!due.is_due(metrics.step)) {
    return true;
  }
  evaluate(parts);
  // The call resets the memory counters, so that the memory of the evaluation is not counted in the
  // next step.
  observe::take_memory_use(options.device);
  metrics.eval_loss = parts.held_out;
  return parts.held_out.has_value();
}

void save_if_due(RunParts& parts, bool stopped) {
  const training::TrainState& state = parts.run.state;
  const std::optional<double> stall = parts.checkpoints.after_step(state, parts.entries, stopped);
  if (stall) {
    parts.log.stalled(stall);
    parts.log.line(fmt::format("checkpoint: {} ({:.2f} s)",
                               parts.checkpoints.folder(state.step).string(), *stall));
  }
}

/// Runs the remaining steps. Returns false if a signal stopped the training.
bool train_steps(RunParts& parts, std::optional<double> peak_flops) {
  LlamaRun& run = parts.run;
  const TrainOptions& options = run.options;
  const observe::ModelFlops flops = flops_of(options, run.config);
  bool stopped = stop_if_asked(parts);  // a signal may have arrived while the model was created
  while (run.state.step < options.steps && !stopped) {
    observe::StepMetrics metrics = parts.recording.run(run.state, [&run] { return run.step(); });
    observe::set_throughput(metrics, options.batch * options.seq, run.world->size(), flops,
                            peak_flops);
    stopped = !evaluate_if_due(parts, metrics);
    parts.log.write(metrics, run.state.samples * options.seq);
    stopped = stopped || stop_if_asked(parts);
    save_if_due(parts, stopped);
  }
  parts.log.end();
  return !stopped;
}

/// Evaluates after the last step. Returns false if a signal stopped the evaluation.
bool evaluate_at_end(RunParts& parts) {
  if (parts.run.data.eval_loader == nullptr) {
    return true;
  }
  if (!parts.held_out) {
    evaluate(parts);
  }
  if (parts.held_out && parts.run.is_main()) {
    print_held_out_loss(parts.run, *parts.held_out);
  }
  return parts.held_out.has_value();
}

}  // namespace

bool train(const TrainOptions& given, const comm::WorldPtr& world, const StopSignals* signals) {
  check_same_start(*world, given.shared, model_config(given));
  const TrainOptions options = with_chosen_ac(given, *world);
  choose_kernels(options);
  training::Recording recording(recording_options(options));
  training::Checkpointer checkpoints(checkpoint_options(options), world);
  LlamaRun run(options, world, checkpoints.loads());
  training::MetricLog log(metric_options(options), world);
  RunParts parts{run, recording, checkpoints, log, signals, {}};
  if (!options.checkpoint.empty() || checkpoints.loads()) {
    parts.entries = checkpoint_entries(run);
  }
  if (checkpoints.loads()) {
    load_checkpoint(run, checkpoints, parts.entries);
  }
  recording.begin(*run.world, run.state.step);
  // Outputs are created after all checks that precede the first step, so that a failed start leaves
  // no files.
  prepare_outputs(run, checkpoints, log);

  // From here on, implicit communication outside of parallel styles and FSDP throws Error.
  const StrictScope strict;
  const std::optional<double> peak_flops =
      run.state.step < options.steps ? peak_flops_of(options, *world) : std::nullopt;
  print_start(run, checkpoints, peak_flops);
  if (options.verify) {
    log.line(verify(run));
  }
  keep_freed_memory();
  const bool finished = train_steps(parts, peak_flops) && evaluate_at_end(parts);
  const std::exception_ptr unsaved = checkpoints.finish(run.state, parts.entries);
  if (finished) {
    training::with_averaged_weights(*run.optimizer, [&run] { export_weights(run); });
    write_record(run);
  }
  if (unsaved) {
    std::rethrow_exception(unsaved);
  }
  return finished;
}

}  // namespace llama
