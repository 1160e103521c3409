// The command line of llama_train: declared in groups as --help and docs/programs/training.md list
// them, then checked for what the flags say about one another. What depends on files or on other
// ranks is checked where it is read.

#include "examples/llama/train/options/train_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <iostream>
#include <utility>

#include "examples/llama/cli.h"
#include "examples/llama/resolved_flags.h"
#include "examples/llama/train/options/checkpoint_options.h"
#include "examples/llama/train/options/fine_tuning_options.h"
#include "examples/llama/train/options/measuring_options.h"
#include "examples/llama/train/options/observation_options.h"
#include "examples/llama/train/options/outputs.h"
#include "tessera/core/error.h"

namespace llama {
namespace {

/// Keeps the products of degrees far from overflow.
constexpr std::int64_t kMaxDegree = 1'000'000;

void declare_model(CLI::App& app, TrainOptions& o) {
  app.add_option("--model", o.model,
                 "Hugging Face folder: config.json and *.safetensors; or a name in the hub's cache")
      ->option_text("DIR|ORG/NAME")
      ->transform(hub_name(tessera::HubPart::kModel));
  app.add_option("--config", o.config, "config.json alone; weights are initialised from --seed")
      ->option_text("FILE|ORG/NAME")
      ->transform(hub_name(tessera::HubPart::kConfig));
  app.add_option("--seed", o.seed, "Seed of the initial weights and of dropout (0)")
      ->check(number_of_at_least_0());
}

void declare_steps(CLI::App& app, TrainOptions& o) {
  app.add_option("--steps", o.steps, "Optimizer steps (10)")->check(number_of_at_least_0());
  app.add_option("--batch", o.batch, "Sequences a step over all ranks (4)")
      ->check(number_above_0());
  app.add_option("--seq", o.seq, "Tokens a sequence (128)")->check(number_above_0());
}

void declare_optimizer(CLI::App& app, TrainOptions& o) {
  app.add_option("--optimizer", o.optimizer,
                 "adamw, sgd, or muon for the matrices of the blocks with adamw for the rest "
                 "(adamw)")
      ->check(CLI::IsMember({"adamw", "sgd", "muon"}));
  app.add_option("--betas", o.betas, "AdamW's decay rates of its two means (0.9,0.95)")
      ->delimiter(',')
      ->expected(2)
      ->option_text("B1,B2")
      ->check(number_between(0.0, 1.0));
  app.add_option("--eps", o.eps, "What AdamW adds to a root (1e-8)")->check(number_above_0());
  app.add_option("--momentum", o.momentum, "Of sgd and muon (0.95)")
      ->check(number_between(0.0, 0.9999));
  app.add_option("--lr", o.lr, "Peak learning rate (1e-3)")->check(number_of_at_least_0());
  app.add_option("--min-lr", o.min_lr, "What a falling schedule ends at (0)")
      ->check(number_of_at_least_0());
  app.add_option("--schedule", o.schedule,
                 "constant, cosine, linear or wsd: stable, then linear (constant)")
      ->check(CLI::IsMember({"constant", "cosine", "linear", "wsd"}));
  app.add_option("--decay-ratio", o.decay_ratio, "The share of the steps in which wsd falls (0.2)")
      ->check(number_between(0.0, 1.0));
  app.add_option("--warmup", o.warmup, "Steps of linear warm-up (0)")
      ->check(number_of_at_least_0());
  app.add_option("--clip", o.clip, "Largest gradient norm (1.0)")->check(number_above_0());
  app.add_option("--dropout", o.dropout,
                 "Dropout of what attention and MLP add to the residual (0)")
      ->check(number_between(0.0, 0.999));
  app.add_option("--weight-decay", o.weight_decay, "The optimizer's, on every parameter (0.1)")
      ->check(number_of_at_least_0());
  app.add_option("--ema", o.ema,
                 "Keep an average of the weights with this decay, which evaluation and what is "
                 "saved at the end have in their place (none)")
      ->check(number_between(0.0, 0.999999));
  add_switch(app, "--decay-matrices-only", o.decay_matrices_only,
             "No weight decay of norms and biases");
  app.add_option("--z-loss", o.z_loss, "Adds this times log(sum of exp(logits))^2 a token (0)")
      ->check(number_of_at_least_0());
  app.add_option("--label-smoothing", o.label_smoothing,
                 "The share of each target that is spread over the vocabulary (0)")
      ->check(number_between(0.0, 1.0));
}

/// Degrees, and what is done with memory and types: everything that changes how the run is spread,
/// and nothing that changes what is computed, except for rounding.
void declare_parallelism(CLI::App& app, TrainOptions& o) {
  const CLI::Validator degree = number_between(1, kMaxDegree);
  app.add_option("--dp", o.dp, "FSDP degree (1)")->check(degree);
  app.add_option(
         "--cp", o.cp,
         "Context-parallel degree (1): each sequence is split over as many ranks; --seq must be a "
         "multiple of 2 x cp")
      ->check(degree);
  app.add_option("--tp", o.tp, "Tensor-parallel degree (1)")->check(degree);
  app.add_option(
         "--dp-replicate", o.dp_replicate,
         "Replicas of the dp x cp x tp mesh (1): HSDP; dp-replicate x dp x cp x tp ranks in all")
      ->check(degree);
  app.add_option("--zero", o.zero,
                 "3: free parameters between forward and backward; 2: keep them gathered (3)")
      ->check(CLI::IsMember({2, 3}));
  add_switch(app, "--reshard-last,!--no-reshard-last", o.reshard_last,
             "With --zero 3: free also what backward needs first, the last block, final norm and "
             "head (off)");
  app.add_option("--accumulate", o.accumulate,
                 "Micro-batches that each rank splits its part of --batch into (1)")
      ->check(degree);
  add_switch(app, "--sp,!--no-sp", o.sp,
             "Sequence parallelism between the blocks' halves (with tp > 1)");
  add_switch(app, "--sp-regather,!--no-sp-regather", o.sp_regather,
             "With --sp and --ac none: keep the blocks' inputs split, and gather them again in "
             "backward");
  add_switch(app, "--loss-parallel,!--no-loss-parallel", o.loss_parallel,
             "Keep the logits split over the vocabulary (with tp > 1)");
  app.add_option("--loss-chunks", o.loss_chunks,
                 "Head and loss take a micro-batch's tokens in N parts, so that its logits never "
                 "exist whole; 0, 1: all at once (parts of 256 MiB, where the logits are larger)")
      ->option_text("N")
      ->check(number_between(0, kMaxDegree));
  app.add_option("--ac", o.ac,
                 "Activation checkpointing of the blocks: none; full: backward computes all again; "
                 "selective: all but attention and half of the matrix multiplications (none)")
      ->check(CLI::IsMember({"none", "full", "selective"}));
  add_switch(app, "--offload,!--no-offload", o.offload,
             "Keep shards, gradients and the optimizer's state in the host's memory");
  app.add_option("--param-dtype", o.param_dtype,
                 "Type of gathers and computation: fp32, bf16 or, with dynamic loss scaling, fp16 "
                 "(bf16 on CUDA, fp32 on CPU)")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  app.add_option("--reduce-dtype", o.reduce_dtype,
                 "Type of gradient reduction: fp32 or bf16 (fp32)")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--device", o.device, "cpu or cuda (cpu)")->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--backend", o.backend, "gloo or nccl (gloo on CPU, nccl on CUDA)")
      ->check(CLI::IsMember({"gloo", "nccl"}));
}

void declare_output(CLI::App& app, TrainOptions& o) {
  app.add_option("--metrics", o.metrics, "A JSON object a step; report.html is written beside it")
      ->option_text("FILE.jsonl");
  app.add_option("--save-hf", o.save_hf, "Write the weights at the end in Hugging Face's form")
      ->option_text("DIR");
  app.add_option("--save-hf-dtype", o.save_hf_dtype,
                 "Type of the weights of --save-hf: fp32, bf16 or fp16 (fp32)")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  declare_observation(app, o);
  app.add_option("--print-plan", o.print_plan,
                 "Print what each rank of the mesh holds and sends in a step, and end; needs no "
                 "data, no other ranks and no memory: table or json (table)")
      ->option_text("[=json]")
      ->expected(0, 1)
      ->default_str("table")
      ->check(CLI::IsMember({"table", "json"}));
  add_switch(app, "--verify", o.verify,
             "Before the first step compare forward and backward of one sample of each "
             "data-parallel rank with what one rank computes, which has the memory for that");
  app.add_option("--log-every", o.log_every, "Steps between console lines (10)")
      ->check(number_above_0());
  // Read by parse_command_line(); declared here for --help.
  app.add_option("--config-file", "The same names in a TOML file; flags win over it")
      ->option_text("FILE.toml");
}

/// What does not go with sequences that are split.
void check_context_parallel(const TrainOptions& o) {
  TESSERA_CHECK(o.cp == 1 || o.seq % (2 * o.cp) == 0, "--seq ", o.seq, " is not a multiple of ",
                2 * o.cp, ", 2 x --cp ", o.cp,
                "; each rank takes two chunks of every sequence, all of one length");
  TESSERA_CHECK(o.cp == 1 || (o.dropout == 0 && o.lora_dropout == 0),
                o.dropout > 0 ? "--dropout" : "--lora-dropout", " is given with --cp ", o.cp,
                ", whose ranks would not drop what one rank drops; leave out one of them");
  TESSERA_CHECK(o.cp == 1 || std::getenv("TESSERA_COMPARE") == nullptr,
                "TESSERA_COMPARE is set with --cp ", o.cp,
                ", but puts no tensors of split sequences together; compare a run without --cp");
}

/// All ranks have the same command line and so stop at the same check.
void check_consistent(const CLI::App& app, const TrainOptions& o) {
  TESSERA_CHECK(o.model.empty() != o.config.empty(),
                o.model.empty() ? "no model given; pass --model DIR or --config FILE"
                                : "--model and --config are both given; pass one of them");
  check_data(app, o, /*needed=*/o.steps > 0 && o.print_plan.empty() && !o.planned);
  // Sequences are dealt out evenly; a rank with fewer would make the mean of the ranks' means
  // another number than the mean.
  const std::int64_t parts = o.dp_replicate * o.dp * o.accumulate;
  TESSERA_CHECK(
      o.batch % parts == 0, "--batch ", o.batch, " is not a multiple of ",
      product_text(
          {{"--dp", o.dp}, {"--dp-replicate", o.dp_replicate}, {"--accumulate", o.accumulate}}),
      "; every micro-batch of every data-parallel rank takes the same number of sequences");
  const std::size_t betas = app.get_option("--betas")->count();
  TESSERA_CHECK(betas == 0 || betas == 2, "--betas has ", betas, betas == 1 ? " value" : " values",
                "; give two, B1,B2");
  TESSERA_CHECK(o.save_hf_dtype.empty() || !o.save_hf.empty(),
                "--save-hf-dtype is given without --save-hf; pass the folder of the weights");
  TESSERA_CHECK(o.device == "cuda" || o.backend != "nccl",
                "--backend nccl needs --device cuda; on the CPU use gloo");
  TESSERA_CHECK(o.loss_parallel || o.loss_chunks.value_or(1) <= 1,
                "--no-loss-parallel gathers the logits, which --loss-chunks ", *o.loss_chunks,
                " leaves out; leave out one of them");
  TESSERA_CHECK(o.zero == 3 || !o.reshard_last,
                "--reshard-last is given with --zero 2, which keeps all parameters gathered; leave "
                "out one of them");
  TESSERA_CHECK(o.min_lr <= o.lr, "--min-lr ", o.min_lr, " is more than --lr ", o.lr,
                ", from which the rate falls");
  check_context_parallel(o);
  check_checkpoints(o);
  check_measuring(o);
}

std::vector<FlagUse> uses_of_optimizer_flags(const TrainOptions& o) {
  return {{"--betas", o.optimizer != "sgd", "--optimizer adamw and muon"},
          {"--eps", o.optimizer != "sgd", "--optimizer adamw and muon"},
          {"--momentum", o.optimizer != "adamw", "--optimizer sgd and muon"},
          {"--min-lr", o.schedule != "constant", "--schedule cosine, linear and wsd"},
          {"--decay-ratio", o.schedule == "wsd", "--schedule wsd"}};
}

/// Flags that would change nothing beside the others.
void check_used(const CLI::App& app, const TrainOptions& o) {
  for (const FlagUse& use : uses_of_optimizer_flags(o)) {
    TESSERA_CHECK(use.used || app.get_option(use.flag)->count() == 0, use.flag,
                  " is given, but is for ", use.where, "; leave it out, or choose one of these");
  }
}

/// Defaults that this run would refuse if they were given.
std::vector<LeftOut> unused_flags(const TrainOptions& o) {
  std::vector<LeftOut> flags;
  for (const auto& uses :
       {uses_of_data_flags(o), uses_of_optimizer_flags(o), uses_of_fine_tuning_flags(o)}) {
    for (const FlagUse& use : uses) {
      if (!use.used) {
        flags.push_back({std::string(use.flag).substr(2), std::string("for ") + use.where});
      }
    }
  }
  return flags;
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

void declare_all(CLI::App& app, TrainOptions& o) {
  declare_model(app, o);
  declare_data(app, o);
  declare_steps(app, o);
  declare_optimizer(app, o);
  declare_fine_tuning(app, o);
  declare_parallelism(app, o);
  declare_checkpoints(app, o);
  declare_output(app, o);
  declare_measuring(app, o);
}

void parse(CLI::App& app, std::vector<std::string> arguments) {
  try {
    parse_command_line(
        app, std::move(arguments),
        {{"model", "config"}, {"tokens", "text", "jsonl"}, {"resume", "resume-step"}});
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    throw;
  }
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
  if (!o.model.empty() && o.print_plan.empty()) {
    tessera::check_hub_weights(o.model);
  }
  check_used(app, o);
  check_fine_tuning(app, o);
  check_observation(o);
  o.inputs = read_files(app);
  check_outputs(o);
  std::vector<ResolvedFlag> flags = resolve_flags(app);
  leave_out(flags, unused_flags(o));
  o.listing = list(flags);
  leave_out(flags, placed);
  o.resolved = to_toml(flags);
}

}  // namespace

/// A plan reads a model's configuration, and nothing else.
TrainOptions planned(TrainOptions o) {
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
  parse(app, std::move(arguments));
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
  declare(app);
  declare_all(app, o);
  parse(app, std::move(arguments));
  if (app.get_option("--device")->count() == 0 && uses_gpu()) {
    o.device = "cuda";
  }
  o = planned(std::move(o));
  finish(app, o);
  return o;
}

}  // namespace llama
