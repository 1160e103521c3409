// The command line of llama_train: declared by section, as --help-all and docs/programs/training.md
// list the flags, then checked for what they say about one another. What depends on files or on
// other ranks is checked where it is read.

#include "examples/llama/train/options/train_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <utility>

#include "examples/llama/config_file.h"
#include "examples/llama/train/options/sections.h"
#include "tessera/core/error.h"

namespace llama {
namespace {

/// What a first user needs, and so what --help shows.
constexpr const char* kFirst =
    "model config tokenizer tokens text steps batch seq param-dtype device eval-text lr schedule "
    "warmup dp tp cp ac checkpoint checkpoint-every resume save-hf output-dir print-plan";

/// A flag that is for some runs only.
struct FlagUse {
  const char* flag;
  bool used;          ///< by this run
  const char* where;  ///< what it is for
};

std::vector<FlagUse> uses(const TrainOptions& o) {
  return {{"--lora-alpha", o.lora_rank > 0, "--lora-rank"},
          {"--lora-targets", o.lora_rank > 0, "--lora-rank"},
          {"--lora-dropout", o.lora_rank > 0, "--lora-rank"},
          {"--save-lora", o.lora_rank > 0, "--lora-rank"},
          {"--merge-lora", o.lora_rank > 0, "--lora-rank"},
          {"--weight", !o.tokens.empty(), "--tokens"},
          {"--prompt-field", !o.jsonl.empty(), "--jsonl"},
          {"--completion-field", !o.jsonl.empty(), "--jsonl"},
          {"--truncate", !o.jsonl.empty(), "--jsonl"},
          {"--document-mask", o.jsonl.empty(), "--tokens and --text"},
          {"--eos-token", o.document_mask || !o.jsonl.empty(), "--document-mask and --jsonl"},
          {"--betas", o.optimizer != "sgd", "--optimizer adamw and muon"},
          {"--eps", o.optimizer != "sgd", "--optimizer adamw and muon"},
          {"--moment-dtype", o.optimizer != "sgd", "--optimizer adamw and muon"},
          {"--momentum", o.optimizer != "adamw", "--optimizer sgd and muon"},
          {"--allow-math-attention", o.device == "cuda", "--device cuda"},
          {"--deterministic", o.device == "cuda", "--device cuda"},
          {"--min-lr", o.schedule != "constant", "--schedule cosine, linear and wsd"},
          {"--decay-ratio", o.schedule == "wsd", "--schedule wsd"}};
}

/// Refuses flags that would change nothing beside the others. Returns those of them that are not
/// given: their defaults are not the run's.
std::vector<LeftOut> unused_flags(const CLI::App& app, const TrainOptions& o) {
  std::vector<LeftOut> flags;
  for (const FlagUse& use : uses(o)) {
    TESSERA_CHECK(use.used || app.get_option(use.flag)->count() == 0, use.flag,
                  " is given, but is for ", use.where, "; leave it out, or give one of these");
    if (!use.used) {
      flags.push_back({std::string(use.flag).substr(2), std::string("for ") + use.where});
    }
  }
  return flags;
}

/// All ranks have the same command line and so stop at the same check.
void check_consistent(const CLI::App& app, const TrainOptions& o) {
  TESSERA_CHECK(o.model.empty() != o.config.empty(),
                o.model.empty() ? "no model given; pass --model DIR or --config FILE"
                                : "--model and --config are both given; pass one of them");
  check_data(o, /*needed=*/o.steps > 0 && o.print_plan.empty() && !o.planned);
  const std::size_t betas = app.get_option("--betas")->count();
  TESSERA_CHECK(betas == 0 || betas == 2, "--betas has ", betas, betas == 1 ? " value" : " values",
                "; give two, B1,B2");
  TESSERA_CHECK(o.min_lr <= o.lr, "--min-lr ", o.min_lr, " is more than --lr ", o.lr,
                ", from which the rate falls; give a smaller one");
  check_fp8(o);
  check_parallelism(o);
  check_checkpoints(o);
  check_metrics(o);
  if (!o.model.empty() && o.print_plan.empty()) {
    tessera::check_hub_weights(o.model);
  }
}

/// For the report: all that this run uses, given or not.
std::vector<std::pair<std::string, std::string>> list(const std::vector<ResolvedFlag>& flags) {
  std::vector<std::pair<std::string, std::string>> rows;
  for (const ResolvedFlag& flag : flags) {
    if (flag.note.empty() && !flag.values.empty()) {
      rows.emplace_back("--" + flag.name, CLI::detail::join(flag.values, ","));
    }
  }
  return rows;
}

}  // namespace

bool resumes(const TrainOptions& o) {
  return !o.resume.empty() || o.resume_step >= 0;
}

/// In the terms of the command line, because that is where the user will change it.
std::string product_text(const std::vector<std::pair<std::string, std::int64_t>>& degrees) {
  std::string text;
  for (const auto& [name, degree] : degrees) {
    if (degree != 1) {
      text += (text.empty() ? "" : " x ") + name + " " + std::to_string(degree);
    }
  }
  return text.empty() ? degrees.front().first + " 1" : text;
}

namespace {

/// Section by section: a file has each of them once.
void declare_all(CLI::App& app, TrainOptions& o) {
  declare_model(app, o);
  declare_training(app, o);
  declare_optimizer(app, o);
  declare_parallelism(app, o);
  declare_checkpoint(app, o);
  declare_metrics(app, o);
}

/// `first`: the flags that --help shows.
void parse(CLI::App& app, std::vector<std::string> arguments, const FlagNames& first) {
  parse_command_line(app, std::move(arguments),
                     {{"model", "config"},
                      {"tokens", "text", "jsonl"},
                      {"weight", "text"},
                      {"weight", "jsonl"},
                      {"eval-text", "eval-tokens"},
                      {"resume", "resume-step"}},
                     first);
}

/// Defaults that depend on another flag are filled in once all are known.
void finish(CLI::App& app, TrainOptions& o) {
  for (const CLI::Option* option : app.get_options()) {
    if (option->count() > 0) {
      o.given.push_back("--" + option->get_single_name());
    }
  }
  if (o.param_dtype.empty()) {
    o.param_dtype = o.device == "cuda" ? "bf16" : "fp32";
  }
  if (o.backend.empty()) {
    o.backend = o.device == "cuda" ? "nccl" : "gloo";
  }
  const std::vector<LeftOut> placed = place_outputs(app, o);
  check_consistent(app, o);
  const std::vector<LeftOut> unused = unused_flags(app, o);
  check_fine_tuning(o);
  o.inputs = read_files(app);
  check_outputs(o);
  std::vector<ResolvedFlag> flags = resolve_flags(app);
  leave_out(flags, unused);
  o.listing = list(flags);
  o.shared = shared_by_ranks(flags);
  leave_out(flags, placed);
  o.resolved = to_toml(flags);
}

}  // namespace

/// A plan reads a model's configuration, and nothing else.
TrainOptions planned(TrainOptions o) {
  TESSERA_CHECK(o.dp > 0, "--dp -1 is for ranks that are running; a plan needs the number");
  o.planned = true;
  if (!o.model.empty() && o.config.empty()) {
    o.config = o.model + "/config.json";
    o.model.clear();
  }
  for (std::string* file : {&o.checkpoint, &o.initial_load, &o.resume, &o.metrics, &o.save_hf,
                            &o.save_lora, &o.print_plan, &o.tensorboard, &o.output_dir, &o.trace,
                            &o.trace_steps, &o.profile, &o.memory_report}) {
    file->clear();
  }
  o.merge_lora = false;
  o.verify = false;
  o.checkpoint_every = 0;
  o.resume_step = -1;
  o.async = true;
  o.keep = 0;
  o.exclude.clear();
  o.steps = std::max<std::int64_t>(o.steps, 1);
  return o;
}

TrainOptions parse_train_options(std::vector<std::string> arguments) {
  TrainOptions o;
  CLI::App app(
      "Trains a Llama on a mesh of dp-replicate x dp x cp x tp ranks. Start it under tessera-run, "
      "torchrun, "
      "Slurm or Open MPI for more than one rank.",
      "llama_train");
  declare_all(app, o);
  parse(app, std::move(arguments), CLI::detail::split(kFirst, ' '));
  finish(app, o);
  return o;
}

TrainOptions parse_plan_options(std::vector<std::string> arguments,
                                const std::function<void(CLI::App&)>& declare,
                                const std::function<bool()>& uses_gpu) {
  TrainOptions o;
  CLI::App app(
      "Says what every rank of a run of llama_train will hold, compute and send: the real model "
      "and "
      "a real step of one rank of each kind, without values, in one process and without a GPU. "
      "Takes "
      "llama_train's flags.",
      "llama_plan");
  app.option_defaults()->group("plan");
  declare(app);
  FlagNames first = CLI::detail::split(kFirst, ' ');
  for (const CLI::Option* option : app.get_options()) {
    first.push_back(option->get_single_name());
  }
  declare_all(app, o);
  parse(app, std::move(arguments), first);
  if (app.get_option("--device")->count() == 0 && uses_gpu()) {
    o.device = "cuda";
  }
  o = planned(std::move(o));
  finish(app, o);
  return o;
}

}  // namespace llama
