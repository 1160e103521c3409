#include "examples/llama/train_options.h"

#include <iostream>

#include "examples/llama/cli.h"
#include "tessera/core/error.h"

namespace llama {
namespace {

/// Keeps the products of degrees far from overflow.
constexpr std::int64_t kMaxDegree = 1'000'000;

void declare_model(CLI::App& app, TrainOptions& o) {
  app.add_option("--model", o.model, "Hugging Face folder: config.json and *.safetensors")
      ->option_text("DIR");
  app.add_option("--config", o.config, "config.json alone; weights are initialised from --seed")
      ->option_text("FILE");
  app.add_option("--seed", o.seed, "Seed of the initial weights (0)");
}

void declare_data(CLI::App& app, TrainOptions& o) {
  app.add_option("--tokens", o.tokens, "llm.c token shards; a glob, in quotes")
      ->option_text("GLOB");
  app.add_option("--text", o.text, "A text file, tokenized here")->option_text("FILE");
  app.add_option("--tokenizer", o.tokenizer, "SentencePiece model for --text (default: bytes)")
      ->option_text("FILE");
  app.add_option("--eval-text", o.eval_text,
                 "Held-out text: its loss is printed at the end, beside its byte-bigram entropy")
      ->option_text("FILE");
  app.add_option("--steps", o.steps, "Optimizer steps (10)")->check(CLI::NonNegativeNumber);
  app.add_option("--batch", o.batch, "Sequences a step over all ranks (4)")
      ->check(CLI::PositiveNumber);
  app.add_option("--seq", o.seq, "Tokens a sequence (128)")->check(CLI::PositiveNumber);
}

void declare_optimizer(CLI::App& app, TrainOptions& o) {
  app.add_option("--lr", o.lr, "Peak learning rate (1e-3)")->check(CLI::NonNegativeNumber);
  app.add_option("--schedule", o.schedule, "constant, cosine or linear (constant)")
      ->check(CLI::IsMember({"constant", "cosine", "linear"}));
  app.add_option("--warmup", o.warmup, "Steps of linear warm-up (0)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--clip", o.clip, "Largest gradient norm (1.0)")->check(CLI::PositiveNumber);
  app.add_option("--weight-decay", o.weight_decay, "AdamW's, on every parameter (0.1)")
      ->check(CLI::NonNegativeNumber);
}

void declare_parallelism(CLI::App& app, TrainOptions& o) {
  const CLI::Range degree(std::int64_t{1}, kMaxDegree);
  app.add_option("--dp", o.dp, "FSDP degree (1)")->check(degree);
  app.add_option("--tp", o.tp, "Tensor-parallel degree (1)")->check(degree);
  app.add_option("--dp-replicate", o.dp_replicate,
                 "Replicas of the dp x tp mesh (1): HSDP; dp-replicate x dp x tp ranks in all")
      ->check(degree);
  app.add_option("--zero", o.zero,
                 "3: free parameters between forward and backward; 2: keep them gathered (3)")
      ->check(CLI::IsMember({2, 3}));
  app.add_option("--accumulate", o.accumulate,
                 "Micro-batches that each rank splits its part of --batch into (1)")
      ->check(degree);
  app.add_flag("--sp,!--no-sp", o.sp,
               "Sequence parallelism between the blocks' halves (with tp > 1)");
  app.add_flag("--loss-parallel,!--no-loss-parallel", o.loss_parallel,
               "Keep the logits split over the vocabulary (with tp > 1)");
  app.add_option("--ac", o.ac,
                 "Activation checkpointing of the blocks: none; full: backward computes all again; "
                 "selective: all but attention and half of the matrix multiplications (none)")
      ->check(CLI::IsMember({"none", "full", "selective"}));
  app.add_flag("--offload,!--no-offload", o.offload,
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
  app.add_option("--log-every", o.log_every, "Steps between console lines (10)")
      ->check(CLI::PositiveNumber);
  app.add_option("--config-file", "The same names in a TOML file; flags win over it")
      ->option_text("FILE.toml");
}

void check_consistent(const TrainOptions& o) {
  TESSERA_CHECK(o.model.empty() != o.config.empty(),
                o.model.empty() ? "no model given; pass --model DIR or --config FILE"
                                : "--model and --config are both given; pass one of them");
  TESSERA_CHECK(o.tokens.empty() || o.text.empty(),
                "--tokens and --text are both given; pass one of them");
  TESSERA_CHECK(o.steps == 0 || !o.tokens.empty() || !o.text.empty(),
                "no data given; pass --tokens GLOB or --text FILE (or --steps 0)");
  const std::int64_t parts = o.dp_replicate * o.dp * o.accumulate;
  TESSERA_CHECK(
      o.batch % parts == 0, "--batch ", o.batch, " is not a multiple of ",
      product_text(
          {{"--dp", o.dp}, {"--dp-replicate", o.dp_replicate}, {"--accumulate", o.accumulate}}),
      "; every micro-batch of every data-parallel rank takes the same number of sequences");
  TESSERA_CHECK(o.device == "cuda" || o.backend != "nccl",
                "--backend nccl needs --device cuda; on the CPU use gloo");
}

std::vector<std::pair<std::string, std::string>> list(const CLI::App& app) {
  std::vector<std::pair<std::string, std::string>> rows;
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = option->get_single_name();
    if (name == "help" || option->count() == 0) continue;
    rows.emplace_back("--" + name, option->as<std::string>());
  }
  return rows;
}

}  // namespace

std::string product_text(const std::vector<std::pair<std::string, std::int64_t>>& degrees) {
  std::string text;
  for (const auto& [name, degree] : degrees) {
    if (degree != 1) text += (text.empty() ? "" : " x ") + name + " " + std::to_string(degree);
  }
  return text.empty() ? degrees.front().first + " 1" : text;
}

TrainOptions parse_train_options(std::vector<std::string> arguments) {
  TrainOptions o;
  CLI::App app(
      "Trains a Llama on a mesh of dp-replicate x dp x tp ranks. Start it under tessera-run, "
      "torchrun, "
      "Slurm or Open MPI for more than one rank.",
      "llama_train");
  declare_model(app, o);
  declare_data(app, o);
  declare_optimizer(app, o);
  declare_parallelism(app, o);
  declare_output(app, o);
  try {
    parse_command_line(app, std::move(arguments));
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    throw;
  }
  if (o.param_dtype.empty()) o.param_dtype = o.device == "cuda" ? "bf16" : "fp32";
  if (o.backend.empty()) o.backend = o.device == "cuda" ? "nccl" : "gloo";
  check_consistent(o);
  o.listing = list(app);
  return o;
}

}  // namespace llama
