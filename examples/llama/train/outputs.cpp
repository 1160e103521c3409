// The outputs of a run: its folder, its files, and the entries of its checkpoints.

#include "examples/llama/train/run.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "examples/llama/start.h"
#include "examples/llama/train/options.h"
#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace llama {
namespace {

/// The name of a file that an earlier run has written to the folder; "" if there is none.
std::string file_of_a_run(const std::filesystem::path& folder) {
  for (const char* name : {"config.toml", "metrics.jsonl", "run.json"}) {
    if (std::filesystem::exists(folder / name)) {
      return name;
    }
  }
  return "";
}

std::string text_of(const std::string& to_use_it, const TrainOptions& options) {
  return "# The flags of a run of llama_train, given or not. " + to_use_it + options.resolved;
}

/// The flags in a config.toml except --resume, which may differ between starts of a run.
std::string flags_of(const std::string& text) {
  std::istringstream lines(text);
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    if (line.find("resume") == std::string::npos) {
      kept += line + "\n";
    }
  }
  return kept;
}

/// Whether the file `config` was written by a run with equal flags.
bool has_flags(const std::filesystem::path& config, const std::string& text) {
  constexpr std::uint64_t kMostBytes = 1 << 20;
  return std::filesystem::exists(config) &&
         flags_of(tessera::files::read_file(config, "a run's flags", kMostBytes)) == flags_of(text);
}

/// Claims a folder for a new run. With --resume auto, the new run may repeat a run that ended
/// before its first save.
void take_for_a_new_run(const std::filesystem::path& folder, const std::string& text,
                        bool may_begin_again) {
  const std::filesystem::path config = folder / "config.toml";
  const bool begins_again = may_begin_again && has_flags(config, text);
  std::string found = begins_again ? "" : file_of_a_run(folder);
  // If two runs start at the same time, only one run creates the file.
  if (found.empty() && !tessera::files::write_new_file(config, text) && !begins_again) {
    found = "config.toml";
  }
  TESSERA_CHECK(found.empty(), "--output-dir ", folder.string(), " has a run already (", found, ")",
                may_begin_again
                    ? " with other flags, and no checkpoint that --resume auto continues; "
                      "give a new folder"
                    : "; give a new folder, or --resume to continue that run");
}

}  // namespace

void take_run_folder(const TrainOptions& options, bool goes_on) {
  const std::filesystem::path folder(options.output_dir);
  tessera::files::create_folders(folder);
  const std::string text =
      text_of("To make it again:\n# llama_train --config-file THIS_FILE --output-dir NEW_FOLDER\n",
              options);
  if (!goes_on) {
    take_for_a_new_run(folder, text, /*may_begin_again=*/resumes(options));
    return;
  }
  if (tessera::files::write_new_file(folder / "config.toml", text)) {
    return;
  }
  const std::string resumed = text_of(
      "To continue it once more:\n# llama_train --config-file THIS_FILE --output-dir THIS_FOLDER\n",
      options);
  const auto name = [](int i) { return "config-" + std::to_string(i) + ".toml"; };
  for (int i = 2; !tessera::files::write_new_file(folder / name(i), resumed); ++i) {
  }
}

using namespace tessera;

namespace {

/// The folder or name of the base model, for an export of adapters.
std::string base_model(const TrainOptions& options) {
  return options.model.empty() ? std::filesystem::path(options.config).parent_path().string()
                               : options.model;
}

void open_outputs(const LlamaRun& run, training::Checkpointer& checkpoints,
                  training::MetricLog& log) {
  const TrainOptions& options = run.options;
  if (!options.save_hf.empty()) {
    checkpoint::check_save_hugging_face(*run.model, options.save_hf, run.config.json,
                                        scalar_type(options.save_hf_dtype));
    if (const auto beside = files_beside_weights(options)) {
      checkpoint::check_beside_weights(*beside, options.save_hf);
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
}

/// A text about the attention kernel of this rank, so that the log shows a slow kernel before the
/// first step.
std::string attention_of_a_rank(const LlamaRun& run) {
  const TrainOptions& options = run.options;
  const Config& config = run.config;
  const std::int64_t tp = run.mesh.size("tp");
  const bool window = config.sliding_window > 0 && options.seq > config.sliding_window;
  nn::AttentionKernel kernel = nn::attention_kernel(
      at::device(c10::Device(options.device)).dtype(scalar_type(options.param_dtype)),
      config.num_attention_heads / tp,
      config.num_key_value_heads * key_value_copies(config, tp) / tp, options.seq, config.head_dim,
      /*masked=*/options.cp > 1 && window);
  if (options.cp == 1 && (options.document_mask || window)) {
    kernel = nn::packed_kernel(kernel);
  }
  return nn::to_string(kernel) + (options.deterministic ? ", deterministic" : "");
}

/// A text about how many parameters are trained; "" if all parameters are trained.
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
  std::int64_t linears = 0;
  nn::visit_modules(model, [&](const std::string&, const nn::ModuleBase& module) {
    const auto* linear = dynamic_cast<const nn::Linear*>(&module);
    linears += linear != nullptr && !linear->weight.slot()->role.of_adapter;
  });
  return fmt::format("fp8: {} of {} linear layers", nn::fp8_weights(model).size(), linears);
}

}  // namespace

/// Rank 0 does the work. All ranks throw if rank 0 fails: otherwise the other ranks would continue
/// without rank 0.
void prepare_outputs(const LlamaRun& run, training::Checkpointer& checkpoints,
                     training::MetricLog& log) {
  comm::run_or_fail_together(*start_group(*run.world), c10::kCPU, [&] {
    if (run.is_main()) {
      open_outputs(run, checkpoints, log);
    }
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

void export_weights(LlamaRun& run) {
  const TrainOptions& options = run.options;
  if (!options.save_lora.empty()) {
    checkpoint::save_lora(*run.model, *run.world, options.save_lora, base_model(options));
  }
  if (options.merge_lora) {
    nn::merge_lora(*run.model);
  }
  if (!options.save_hf.empty()) {
    if (const auto beside = files_beside_weights(options); run.is_main() && beside) {
      checkpoint::copy_beside_weights(*beside, options.save_hf);
    }
    checkpoint::save_hugging_face(*run.model, *run.world, options.save_hf, run.config.json,
                                  scalar_type(options.save_hf_dtype));
  }
}

void write_record(const LlamaRun& run) {
  const bool has_place =
      std::filesystem::is_regular_file(run.options.metrics) || !run.options.output_dir.empty();
  if (!run.is_main() || run.options.metrics.empty() || !has_place) {
    return;  // metrics that go to a pipe have no folder for run.json
  }
  observe::write_run_record({.title = "llama_train on " + to_string(run.mesh),
                             .configuration = run.options.listing,
                             .sharding = observe::sharding_table(*run.model)},
                            record_file(run.options));
}

using Json = nlohmann::json;

tessera::nn::LoraOptions lora_options(const TrainOptions& o) {
  return {.rank = o.lora_rank,
          .alpha = o.lora_alpha.value_or(static_cast<double>(o.lora_rank)),
          .targets = o.lora_targets.empty() ? std::vector<std::string>{"model.layers.*.*.*_proj"}
                                            : o.lora_targets,
          .dropout = o.lora_dropout};
}

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

namespace {

/// The first of the given flags whose value differs between `saved` and `now`.
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

/// The first of --optimizer and --ema, which determine the optimizer's state, whose value has
/// changed. Checkpoints of older programs have no --optimizer.
std::string optimizer_change(const Json& saved, const Json& now) {
  const std::string change =
      saved.contains("--optimizer") ? change_of(saved, now, {"--optimizer"}) : "";
  return change.empty() ? change_of(saved, now, {"--ema"}) : change;
}

}  // namespace

Json checkpoint_entries(const LlamaRun& run) {
  return {{"data", run.options.steps > 0 ? data_fingerprint(run.options, run.data) : Json()},
          {"model", Json::parse(run.config.json)},
          {"fine_tuning", fine_tuning_record(run.options)}};
}

namespace {

/// Checks the flags of a run that begins with --initial-load: other flags may differ, but the
/// tensors must fit.
void check_flags_of_begin(const Json& saved, const training::Checkpointer& checkpoints,
                          const TrainOptions& options) {
  const std::string source = checkpoints.source().string();
  // A different --lora-alpha would change the merged weights.
  const std::string change = change_of(saved, fine_tuning_record(options),
                                       {"--lora-rank", "--lora-targets", "--lora-alpha"});
  TESSERA_CHECK(
      change.empty(), "--initial-load: the adapters are not those of '", source, "': ", change,
      "; give the same, or begin with its weights by --model: llama_train --steps 0 "
      "--resume --save-hf DIR writes them, and of a step with adapters --merge-lora as well");
  const std::string of_optimizer =
      checkpoints.excludes("optimizer") ? "" : optimizer_change(saved, fine_tuning_record(options));
  TESSERA_CHECK(of_optimizer.empty(), "--initial-load: the optimizer is not that of '", source,
                "': ", of_optimizer, "; give the same, or --exclude optimizer");
}

/// Compares fine-tuning flags before tensors are loaded: with different adapters or another
/// average, the load's error would be a list of missing names.
void check_fine_tuning_flags(const Json& entries, const training::Checkpointer& checkpoints,
                             const TrainOptions& options) {
  // Checkpoints of older programs lack the record of fine-tuning flags.
  if (!entries.contains("fine_tuning")) {
    return;
  }
  const Json& saved = entries.at("fine_tuning");
  if (!checkpoints.resumes()) {
    check_flags_of_begin(saved, checkpoints, options);
    return;
  }
  const std::string source = checkpoints.source().string();
  const Json now = fine_tuning_record(options);
  // The LoRA rank is compared first, because the record of a run without LoRA lacks all LoRA flags.
  std::string change =
      change_of(saved, now, {"--lora-rank", "--lora-alpha", "--lora-targets", "--lora-dropout"});
  if (change.empty() && !checkpoints.excludes("optimizer")) {
    const std::string frozen = change_of(saved, now, {"--freeze"});
    change = frozen.empty() ? optimizer_change(saved, now) : frozen;
  }
  TESSERA_CHECK(change.empty(), "the flags are not those of the checkpoint '", source,
                "': ", change, "; give the same, or begin a run with --initial-load");
}

void check_data_and_model(const Json& saved, const training::Checkpointer& checkpoints,
                          const LlamaRun& run, const Json& entries) {
  const std::string source = checkpoints.source().string();
  if (!checkpoints.excludes("data") && run.options.steps > 0) {
    const std::string change = data_change(saved.at("data"), entries.at("data"));
    TESSERA_CHECK(change.empty(), "the data are not those of the checkpoint '", source,
                  "': ", change, "; give the same, or --exclude data to begin with other data");
  }
  if (checkpoints.resumes()) {
    const std::string change = checkpoint::config_change(saved.at("model").dump(), run.config.json);
    TESSERA_CHECK(change.empty(), "the model is not that of the checkpoint '", source,
                  "': ", change, "; give the same config.json, or begin a run with --initial-load");
  }
}

}  // namespace

void load_checkpoint(LlamaRun& run, training::Checkpointer& checkpoints, const Json& entries) {
  check_fine_tuning_flags(checkpoints.peek(run.state), checkpoints, run.options);
  const checkpoint::LoadReport report = checkpoints.load(run.state);
  try {
    check_data_and_model(report.entries, checkpoints, run, entries);
  } catch (const Json::exception&) {
    checkpoints.fail_as_foreign();
  }
}

}  // namespace llama
