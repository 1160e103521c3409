// Trains a Llama on a mesh of dp_replicate x dp x ep x cp x tp ranks. train(), the last function in
// this file, executes the whole run. run.cpp has the mesh, model, optimizer and training step. All
// ranks make all collective calls in the same order; only rank 0 prints and writes.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "examples/llama/start.h"
#include "examples/llama/train/options.h"
#include "examples/llama/train/run.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/core/process.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/training/checkpointer.h"
#include "tessera/training/recording.h"
#include "tessera/training/step.h"

namespace llama {

using namespace tessera;
using Json = nlohmann::json;

namespace {

// ---- The folder of --output-dir.

std::string text_of(const std::string& to_use_it, const TrainOptions& options) {
  return "# All flags of a run of llama_train. " + to_use_it + options.resolved;
}

/// Returns the flags that the text of a config.toml contains. Omits --resume: a restart can change
/// --resume.
std::string flags_of(const std::string& text) {
  std::istringstream lines(text);
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("resume") && !line.starts_with("# resume")) {
      kept += line + "\n";
    }
  }
  return kept;
}

/// Reserves a folder for a new run. Throws Error if the folder has a run. With `may_begin_again`
/// (--resume auto), allows an earlier run with the same flags that saved no step.
void take_for_a_new_run(const std::filesystem::path& folder, const std::string& text,
                        bool may_begin_again) {
  const std::filesystem::path config = folder / "config.toml";
  constexpr std::uint64_t kMostBytes = 1 << 20;
  const bool begins_again =
      may_begin_again && std::filesystem::exists(config) &&
      flags_of(files::read_file(config, "a run's flags", kMostBytes)) == flags_of(text);
  std::string found;
  for (const char* name : {"run.json", "metrics.jsonl", "config.toml"}) {
    if (!begins_again && std::filesystem::exists(folder / name)) {
      found = name;
    }
  }
  // If two runs start at the same time, only one of the runs creates config.toml.
  if (found.empty() && !files::write_new_file(config, text) && !begins_again) {
    found = "config.toml";
  }
  TESSERA_CHECK(found.empty(), "--output-dir ", folder.string(), " already has a run (", found, ")",
                may_begin_again ? " with other flags and no checkpoint, so --resume auto can't "
                                  "continue the run; pass a new folder"
                                : "; pass a new folder, or --resume to continue the run");
}

/// Reserves the folder of --output-dir for this run, and writes the flags to config.toml (for a
/// resumed run to config-2.toml and so on). `goes_on`: whether a step was loaded. Throws
/// tessera::Error if another run has the folder, or the folder cannot be written. Call
/// take_run_folder() on rank 0.
void take_run_folder(const TrainOptions& options, bool goes_on) {
  const std::filesystem::path folder(options.output_dir);
  files::create_folders(folder);
  const std::string text =
      text_of("To repeat the run:\n# llama_train --config-file THIS_FILE --output-dir NEW_FOLDER\n",
              options);
  if (!goes_on) {
    take_for_a_new_run(folder, text, /*may_begin_again=*/resumes(options));
    return;
  }
  if (files::write_new_file(folder / "config.toml", text)) {
    return;
  }
  const std::string resumed = text_of(
      "To continue again:\n# llama_train --config-file THIS_FILE --output-dir THIS_FOLDER\n",
      options);
  const auto name = [](int i) { return "config-" + std::to_string(i) + ".toml"; };
  for (int i = 2; !files::write_new_file(folder / name(i), resumed); ++i) {
  }
}

// ---- Outputs.

/// Returns the files that --save-hf copies next to the weights: the files of --model, but with the
/// tokenizer of --tokenizer, if given. Returns nullopt if neither flag is given.
std::optional<std::map<std::string, std::filesystem::path>> copied_files(const TrainOptions& o) {
  if (o.model.empty() && o.tokenizer.empty()) {
    return std::nullopt;
  }
  std::map<std::string, std::filesystem::path> files;
  if (!o.model.empty()) {
    files = checkpoint::other_files(o.model);
  }
  if (o.tokenizer.empty()) {
    return files;
  }
  const std::filesystem::path tokenizer(o.tokenizer);
  std::map<std::string, std::filesystem::path> chosen = checkpoint::other_files(
      std::filesystem::is_directory(tokenizer) ? tokenizer : tokenizer.parent_path());
  chosen.erase("generation_config.json");
  if (!std::filesystem::is_directory(tokenizer)) {
    for (const char* form : {"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"}) {
      chosen.erase(form);
    }
    chosen[data::is_tokenizer_json(o.tokenizer) ? "tokenizer.json" : "tokenizer.model"] = tokenizer;
  }
  chosen.insert(files.extract("generation_config.json"));
  return chosen;
}

std::string base_model(const TrainOptions& options) {
  return options.model.empty() ? std::filesystem::path(options.config).parent_path().string()
                               : options.model;
}

/// Describes the attention kernel of this rank, so that the log shows a slow kernel before the
/// first step.
std::string attention_of_a_rank(const LlamaRun& run) {
  const TrainOptions& options = run.options;
  const Config& config = run.config;
  const std::int64_t tp = run.mesh.size("tp");
  const bool window = config.sliding_window > 0 && options.seq > config.sliding_window;
  const std::string kernel = nn::attention_kernel(
      at::device(c10::Device(options.device)).dtype(scalar_type(options.param_dtype)),
      config.num_attention_heads / tp,
      config.num_key_value_heads * key_value_copies(config, tp) / tp, options.seq, config.head_dim,
      /*masked=*/options.cp > 1 && window,
      /*packed=*/options.cp == 1 && (options.document_mask || window));
  return kernel + (options.deterministic ? ", deterministic" : "");
}

/// Returns text with the number of trained parameters; "" if all parameters are trained.
std::string trained_share(const Llama& model) {
  std::int64_t trained = 0;
  bool all = true;
  for (const nn::SlotPtr& slot : optim::slots_of(model)) {
    const at::Tensor& parameter = slot->persistent();
    trained += parameter.requires_grad() ? parameter.numel() : 0;
    all = all && parameter.requires_grad();
  }
  return all ? "" : fmt::format("  trained: {}", trained);
}

std::string fp8_share(const Llama& model) {
  std::int64_t linears = 0, converted = 0;
  nn::visit_modules(model, [&](const std::string&, const nn::ModuleBase& module) {
    const auto* linear = dynamic_cast<const nn::Linear*>(&module);
    linears += linear != nullptr && !linear->weight.slot()->role.of_adapter;
    converted += linear != nullptr && nn::is_fp8(*linear);
  });
  return fmt::format("fp8: {} of {} linear layers", converted, linears);
}

/// Creates or checks all outputs on rank 0 before the training. Collective: if rank 0 fails, all
/// ranks throw, because the other ranks must not continue without rank 0.
void prepare_outputs(const LlamaRun& run, training::Checkpointer& checkpoints,
                     training::MetricLog& log) {
  const TrainOptions& options = run.options;
  comm::run_or_fail_together(*start_group(*run.world), c10::kCPU, [&] {
    if (!run.is_main()) {
      return;
    }
    if (!options.save_hf.empty()) {
      checkpoint::check_save_hugging_face(*run.model, options.save_hf, run.config.json,
                                          scalar_type(options.save_hf_dtype));
      if (const auto files = copied_files(options)) {
        checkpoint::check_other_files(*files, options.save_hf);
      }
    }
    if (!options.save_lora.empty()) {
      checkpoint::check_save_lora(*run.model, options.save_lora, base_model(options));
    }
    checkpoints.make_folder();
    if (!options.output_dir.empty()) {
      take_run_folder(options, checkpoints.resumes());
    }
    log.open(run.state.step);
  });
}

void print_start(const LlamaRun& run, const training::Checkpointer& checkpoints,
                 std::optional<double> peak_flops) {
  if (!run.is_main()) {
    return;
  }
  const TrainOptions& options = run.options;
  std::cout << to_string(run.mesh) << "  parameters: " << count_parameters(run.config).total
            << trained_share(*run.model) << "  device: " << options.device << " ("
            << options.param_dtype << ")"
            << "  attention: " << attention_of_a_rank(run) << std::endl;
  if (const std::string copies = describe_key_value_copies(run.config, run.mesh.size("tp"));
      !copies.empty()) {
    std::cout << copies << std::endl;
  }
  if (options.fp8) {
    std::cout << fp8_share(*run.model) << std::endl;
  }
  if (peak_flops && !options.peak_flops.empty()) {
    std::cout << fmt::format("peak: {:.4g} TFLOP/s a rank in {}{}", *peak_flops / 1e12,
                             options.param_dtype,
                             options.peak_flops == "measure" ? ", measured" : "")
              << std::endl;
  }
  if (checkpoints.loads()) {
    std::cout << "loaded " << checkpoints.source().string() << ", step "
              << checkpoints.loaded_step() << ": " << run.state.step << " steps are done"
              << std::endl;
  }
}

/// Exports the weights as --save-lora, --merge-lora and --save-hf request. Collective.
void export_weights(LlamaRun& run) {
  const TrainOptions& options = run.options;
  if (!options.save_lora.empty()) {
    checkpoint::save_lora(*run.model, *run.world, options.save_lora, base_model(options));
  }
  if (options.merge_lora) {
    nn::merge_lora(*run.model);
  }
  if (!options.save_hf.empty()) {
    if (const auto files = copied_files(options); run.is_main() && files) {
      checkpoint::copy_other_files(*files, options.save_hf);
    }
    checkpoint::save_hugging_face(*run.model, *run.world, options.save_hf, run.config.json,
                                  scalar_type(options.save_hf_dtype));
  }
}

/// Writes the record of the run, run.json, next to the file of --metrics.
void write_record(const LlamaRun& run) {
  const bool has_place =
      std::filesystem::is_regular_file(run.options.metrics) || !run.options.output_dir.empty();
  if (!run.is_main() || run.options.metrics.empty() || !has_place) {
    return;  // there is no folder for run.json, because --metrics is a pipe
  }
  observe::write_run_record("llama_train on " + to_string(run.mesh), run.options.listing,
                            *run.model, record_file(run.options));
}

// ---- Checkpoints.

/// Returns the flags that determine a training step and the optimizer's state, as a JSON object for
/// checkpoints. Omits flags that are off and the path of config.json.
Json fine_tuning_record(const TrainOptions& o) {
  Json record = Json::object();
  if (o.lora_rank > 0) {
    const tessera::nn::LoraOptions lora = lora_options(o);
    record = {{"--lora-rank", lora.rank},
              {"--lora-alpha", lora.alpha},
              {"--lora-targets", lora.targets},
              {"--lora-dropout", lora.dropout}};
  }
  if (!o.freeze.empty()) {
    record["--freeze"] = o.freeze;
  }
  record["--optimizer"] = o.optimizer;
  if (o.ema) {
    record["--ema"] = *o.ema;
  }
  return record;
}

/// Describes the first flag in `flags` whose values in `saved` and `now` differ; "" if no flag
/// differs.
std::string change_of(const Json& saved, const Json& now,
                      std::initializer_list<const char*> flags) {
  for (const char* flag : flags) {
    const std::string change =
        first_difference(saved.value(flag, Json()), now.value(flag, Json()), flag);
    if (!change.empty()) {
      return change;
    }
  }
  return "";
}

/// Returns the JSON object that each checkpoint of the run contains. Reads a part of each data
/// file.
Json checkpoint_entries(const LlamaRun& run) {
  return {{"data", run.options.steps > 0 ? data_fingerprint(run.options, run.data) : Json()},
          {"model", Json::parse(run.config.json)},
          {"fine_tuning", fine_tuning_record(run.options)}};
}

/// Compares this run's fine-tuning flags with the checkpoint's flags.
void check_fine_tuning_flags(const Json& entries, const training::Checkpointer& checkpoints,
                             const TrainOptions& options) {
  // Checkpoints of older versions of llama_train lack the record of fine-tuning flags.
  if (!entries.contains("fine_tuning")) {
    return;
  }
  const Json& saved = entries.at("fine_tuning");
  const Json now = fine_tuning_record(options);
  const std::string source = checkpoints.source().string();
  // --optimizer and --ema determine the optimizer's state. Old checkpoints have no --optimizer.
  std::string of_optimizer;
  if (!checkpoints.excludes("optimizer")) {
    of_optimizer = saved.contains("--optimizer") ? change_of(saved, now, {"--optimizer", "--ema"})
                                                 : change_of(saved, now, {"--ema"});
  }
  if (!checkpoints.resumes()) {
    // With another --lora-alpha, merging the loaded adapters would give other weights.
    const std::string change =
        change_of(saved, now, {"--lora-rank", "--lora-targets", "--lora-alpha"});
    TESSERA_CHECK(change.empty(), "--initial-load: the adapters differ from '", source,
                  "': ", change,
                  "; pass the checkpoint's values of these flags, or export the checkpoint's "
                  "weights (llama_train --steps 0 --resume --save-hf DIR; add --merge-lora if the "
                  "checkpoint has adapters) and pass --model DIR");
    TESSERA_CHECK(of_optimizer.empty(), "--initial-load: the optimizer differs from '", source,
                  "': ", of_optimizer,
                  "; pass the flags with the checkpoint's values, or pass --exclude optimizer");
    return;
  }
  // The LoRA rank is compared first: without LoRA, the checkpoint has no other LoRA flag.
  std::string change =
      change_of(saved, now, {"--lora-rank", "--lora-alpha", "--lora-targets", "--lora-dropout"});
  if (change.empty() && !checkpoints.excludes("optimizer")) {
    const std::string frozen = change_of(saved, now, {"--freeze"});
    change = frozen.empty() ? of_optimizer : frozen;
  }
  TESSERA_CHECK(
      change.empty(), "the flags differ from the checkpoint '", source, "': ", change,
      "; pass the flags with the checkpoint's values, or begin a new run with --initial-load");
}

void check_data_and_model(const Json& saved, const training::Checkpointer& checkpoints,
                          const LlamaRun& run, const Json& entries) {
  const std::string source = checkpoints.source().string();
  if (!checkpoints.excludes("data") && run.options.steps > 0) {
    const std::string change = data_change(saved.at("data"), entries.at("data"));
    TESSERA_CHECK(change.empty(), "the data differ from the checkpoint '", source, "': ", change,
                  "; pass the data of the checkpoint, or --exclude data to begin with other data");
  }
  if (checkpoints.resumes()) {
    const std::string change = checkpoint::config_change(saved.at("model").dump(), run.config.json);
    TESSERA_CHECK(
        change.empty(), "the model differs from the checkpoint '", source, "': ", change,
        "; pass the config.json of the checkpoint, or begin a new run with --initial-load");
  }
}

/// Loads the run's state. Throws tessera::Error if the checkpoint's data, model or fine-tuning
/// flags differ from the run's `entries`. Collective.
void load_checkpoint(LlamaRun& run, training::Checkpointer& checkpoints, const Json& entries) {
  const auto check = [&](const Json& saved) {
    check_fine_tuning_flags(saved, checkpoints, run.options);
    try {
      check_data_and_model(saved, checkpoints, run, entries);
    } catch (const Json::exception&) {
      checkpoints.fail_as_foreign();
    }
  };
  // The flags, data and model are compared before tensors are loaded, because an error for tensors
  // of another size would not name the cause.
  check(checkpoints.peek(run.state));
  check(checkpoints.load(run.state).entries);  // of an earlier step if the newest is damaged
}

// ---- Evaluation on held-out data.

/// The maximum number of batches in an evaluation: enough for a stable loss, but fast to compute.
constexpr std::int64_t kMaxEvalBatches = 32;

std::int64_t held_out_batches(const LlamaRun& run) {
  return std::min(run.data.eval_loader->samples() / run.options.batch, kMaxEvalBatches);
}

/// Returns the name of the first parameter that has a NaN or Inf on any rank; "" if all values are
/// finite. Collective.
std::string nonfinite_parameter(LlamaRun& run) {
  std::string own;
  for (const auto& [name, slot] : run.model->named_slots()) {
    if (own.empty() && !local_tensor(slot->persistent()).isfinite().all().item<bool>()) {
      own = name;
    }
  }
  const std::vector<std::string> all = comm::gather_texts(*start_group(*run.world), c10::kCPU, own);
  const auto found = std::ranges::find_if_not(all, &std::string::empty);
  return found == all.end() ? "" : *found;
}

/// Returns the mean loss of the held-out data with the current weights; nullopt if `stop`, which is
/// called after each batch, returns true. Collective.
std::optional<double> held_out_loss(LlamaRun& run, const std::function<bool()>& stop) {
  double counted = 0;  // targets per rank, summed over batches; 0 if the loader ignores no targets
  const auto loss_of_batch = [&](std::int64_t i) {
    const data::BatchLoader& loader = *run.data.eval_loader;
    const data::BatchLoader::Batch batch = run.own_rows(loader.load(i, run.rows, run.uses_cuda()));
    tensor_parallel::CrossEntropyOptions options;
    if (loader.ignores_targets()) {
      options.tokens = tensor_parallel::tokens_per_rank(batch.targets, run.data_ranks);
    }
    at::Tensor sum = run.loss_of(batch, 0, options);
    for (std::int64_t k = 1; k < run.options.accumulate; ++k) {
      sum = sum + run.loss_of(batch, k, options);
    }
    if (!options.tokens.defined()) {
      return sum / run.options.accumulate;
    }
    counted += options.tokens.item<double>();
    return sum * options.tokens;
  };
  const std::int64_t batches = held_out_batches(run);
  const std::optional<double> mean =
      training::evaluate(*run.model, run.data_ranks, batches, loss_of_batch, stop);
  if (mean && !std::isfinite(*mean)) {
    const std::string name = nonfinite_parameter(run);
    fail("the held-out loss after step ", run.state.step, " is ", *mean, "; ",
         name.empty() ? "all parameters are finite" : "the parameter " + name + " is not finite",
         "; use the weights of an earlier step");
  }
  return mean && counted > 0 ? *mean * static_cast<double>(batches) / counted : mean;
}

void print_held_out_loss(const LlamaRun& run, double loss) {
  const TrainOptions& options = run.options;
  const std::int64_t tokens = held_out_batches(run) * options.batch * options.seq;
  if (!run.data.eval_text) {
    std::cout << fmt::format("held-out loss: {:.4f} a token ({} tokens of {})", loss, tokens,
                             fmt::join(options.eval_tokens, ", "))
              << std::endl;
    return;
  }
  // The loss per byte of text is comparable between models with different tokenizers. The bytes are
  // those of the evaluated tokens, without the first token, which is not predicted.
  std::vector<std::int64_t> ids(static_cast<std::size_t>(tokens) + 1);
  run.data.eval_text->read(0, ids);
  const data::Tokenizer& tokenizer = *run.data.tokenizer;
  const std::size_t size = tokenizer.decode(ids).size() - tokenizer.decode({ids.front()}).size();
  const double bytes = std::max<double>(static_cast<double>(size), 1);
  std::cout << fmt::format("held-out loss: {:.4f} nats/byte ({:.4f} a token, {} tokens of {})",
                           loss * static_cast<double>(tokens) / bytes, loss, tokens,
                           fmt::join(options.eval_text, ", "))
            << std::endl;
}

// ---- The loop.

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

training::RecordingOptions recording_options(const TrainOptions& o) {
  return {.profile = o.profile,
          .profile_steps = o.profile_steps.empty() ? std::pair<std::int64_t, std::int64_t>{}
                                                   : parse_step_range(o.profile_steps),
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

struct RunParts {
  LlamaRun& run;
  training::Recording& recording;
  training::Checkpointer& checkpoints;
  training::MetricLog& log;
  const StopSignals* signals;
  nlohmann::json entries;
  std::optional<double> held_out = {};
};

/// Whether any rank received a signal. If so, adds a line to the log. Collective.
bool stop_if_asked(const RunParts& parts) {
  const bool stopped = parts.signals != nullptr &&
                       training::stop_requested(parts.signals->received(), parts.run.mesh);
  if (!stopped) {
    return false;
  }
  const std::int64_t step = parts.run.state.step;
  parts.log.line(step == 0 ? "stopped before the first step; start the run again"
                           : fmt::format("stopped after step {}; --resume continues", step));
  return true;
}

void evaluate(RunParts& parts) {
  training::with_averaged_weights(*parts.run.optimizer, [&parts] {
    parts.held_out = held_out_loss(parts.run, [&parts] { return stop_if_asked(parts); });
  });
}

/// Evaluates after a step if --eval-every requires an evaluation. The evaluation changes neither
/// the model nor the state of random numbers. Returns false if a signal stopped the evaluation.
bool evaluate_if_due(RunParts& parts, observe::StepMetrics& metrics) {
  const TrainOptions& options = parts.run.options;
  const std::int64_t every = options.eval_every;
  parts.held_out.reset();
  if (every == 0 || (metrics.step % every != 0 && metrics.step != options.steps)) {
    return true;
  }
  evaluate(parts);
  // take_memory_use() resets the memory counters, so that the next step does not count the
  // evaluation.
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

bool train_steps(RunParts& parts, std::optional<double> peak_flops) {
  LlamaRun& run = parts.run;
  const TrainOptions& options = run.options;
  const observe::ModelFlops flops = flops_of(options, run.config);
  bool stopped = stop_if_asked(parts);  // a signal can arrive while the model is created
  while (run.state.step < options.steps && !stopped) {
    observe::StepMetrics metrics = parts.recording.run(run.state, [&run] { return run.step(); });
    observe::set_throughput(metrics, options.batch * options.seq, run.world->size(), flops,
                            peak_flops);
    stopped = !evaluate_if_due(parts, metrics);
    parts.log.write(metrics, run.state.samples * options.seq);
    stopped = stopped || stop_if_asked(parts);
    save_if_due(parts, stopped);
  }
  return !stopped;
}

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

  // In this scope, implicit communication outside of parallel styles and FSDP throws Error.
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
