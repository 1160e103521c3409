#include <CLI/CLI.hpp>
#include <cmath>
#include <numeric>

#include "examples/llama/cli.h"
#include "examples/llama/train/options/sections.h"
#include "tessera/core/error.h"

namespace llama {
namespace {

// One value a flag where several may be given, or a glob without quotes would take what follows it.

void declare_data(CLI::App& app, TrainOptions& o) {
  app.add_option("--tokens", o.tokens,
                 "llm.c token shards: a glob, in quotes; several are one sequence, or with "
                 "--weight a mixture")
      ->option_text("GLOB")
      ->allow_extra_args(false);
  app.add_option(
         "--weight", o.weights,
         "Share of a --tokens in each batch, against the others; one for each, in their order")
      ->option_text("W")
      ->allow_extra_args(false)
      ->check(number_above_0());
  app.add_option("--text", o.text,
                 "A text file, tokenized here; several one after another, each by itself")
      ->option_text("FILE")
      ->allow_extra_args(false);
  app.add_option("--jsonl", o.jsonl,
                 "JSON lines with a prompt and a completion, which has the loss; a glob, in quotes")
      ->option_text("GLOB")
      ->allow_extra_args(false);
  app.add_option("--prompt-field", o.prompt_field,
                 "The prompt's, in an object of --jsonl (prompt)");
  app.add_option("--completion-field", o.completion_field,
                 "The completion's, in an object of --jsonl (completion)");
  add_switch(app, "--truncate", o.truncate,
             "Cut what is longer than --seq in --jsonl (an error without)");
  app.add_option(
         "--shuffle", o.shuffle,
         "Take the samples in an order of this seed, another in each pass (that of the data)")
      ->option_text("SEED")
      ->check(number_of_at_least_0());
  add_switch(app, "--document-mask", o.document_mask,
             "Tokens attend to their own document alone, and positions begin anew with each");
  app.add_option("--eos-token", o.eos_token,
                 "The token that ends a document or a completion (the tokenizer's or the model's)")
      ->option_text("ID")
      ->check(number_of_at_least_0());
}

void declare_steps(CLI::App& app, TrainOptions& o) {
  app.add_option("--steps", o.steps, "Optimizer steps (10)")->check(number_of_at_least_0());
  app.add_option("--batch", o.batch, "Sequences a step over all ranks (4)")
      ->check(number_above_0());
  app.add_option("--seq", o.seq, "Tokens a sequence (128)")->check(number_above_0());
  app.add_option("--accumulate", o.accumulate,
                 "Micro-batches that each rank splits its part of --batch into (1)")
      ->check(number_between(1, kMaxDegree));
  app.add_option("--seed", o.seed, "Seed of the initial weights and of dropout (0)")
      ->check(number_of_at_least_0());
  app.add_option("--clip", o.clip, "Largest gradient norm (1.0)")->check(number_above_0());
  app.add_option("--z-loss", o.z_loss, "Adds this times log(sum of exp(logits))^2 a token (0)")
      ->check(number_of_at_least_0());
  app.add_option("--label-smoothing", o.label_smoothing,
                 "The share of each target that is spread over the vocabulary (0)")
      ->check(number_between(0.0, 1.0));
  app.add_option("--loss-chunks", o.loss_chunks,
                 "Head and loss take the tokens in N parts, so that the logits never exist whole; "
                 "0, 1: all at once (parts of 640 MiB, where the logits are larger)")
      ->option_text("N")
      ->check(number_between(0, kMaxDegree));
  app.add_option("--param-dtype", o.param_dtype,
                 "Type of gathers and computation: fp32, bf16, or fp16 with loss scaling (bf16 on "
                 "CUDA, fp32 on CPU)")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  app.add_option("--reduce-dtype", o.reduce_dtype,
                 "Type of gradient reduction: fp32 or bf16 (fp32)")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  add_switch(app, "--fp8", o.fp8,
             "Compute the blocks' linear layers, and gather their weights, in 8 bits (off)");
  add_switch(app, "--offload,!--no-offload", o.offload,
             "Keep shards, gradients and the optimizer's state in the host's memory");
  app.add_option("--device", o.device, "cpu or cuda (cpu)")->check(CLI::IsMember({"cpu", "cuda"}));
  add_switch(app, "--allow-math-attention", o.allow_math_attention,
             "Train on CUDA even if no fused kernel takes this attention (an error without)");
  add_switch(app, "--deterministic", o.deterministic,
             "Take libtorch's deterministic algorithms on CUDA, in attention's backward, too");
}

void declare_validation(CLI::App& app, TrainOptions& o) {
  app.add_option("--eval-text", o.eval_text,
                 "Held-out text, whose loss is printed at the end; several are one text")
      ->option_text("FILE")
      ->allow_extra_args(false);
  app.add_option("--eval-tokens", o.eval_tokens,
                 "The same of llm.c token shards; a glob, in quotes")
      ->option_text("GLOB")
      ->allow_extra_args(false);
  app.add_option("--eval-every", o.eval_every,
                 "Evaluate the held-out data after every N steps, too (at the end only)")
      ->option_text("N")
      ->check(number_above_0());
}

}  // namespace

void declare_training(CLI::App& app, TrainOptions& o) {
  app.option_defaults()->group("training");
  declare_data(app, o);
  declare_steps(app, o);
  app.option_defaults()->group("validation");
  declare_validation(app, o);
}

void check_fp8(const TrainOptions& o) {
  TESSERA_CHECK(!o.fp8 || o.param_dtype != "fp16",
                "--fp8 is given with --param-dtype fp16, which does not have the range of scaled "
                "8-bit numbers; take bf16");
  TESSERA_CHECK(!o.fp8 || o.device != "cuda" || o.param_dtype == "bf16",
                "--fp8 is given with --param-dtype ", o.param_dtype,
                ", but on CUDA products in 8 bits give bf16; take that, or leave out one of them");
}

void check_data(const TrainOptions& o, bool needed) {
  const int kinds = static_cast<int>(!o.tokens.empty()) + static_cast<int>(!o.text.empty()) +
                    static_cast<int>(!o.jsonl.empty());
  TESSERA_CHECK(kinds <= 1,
                "of --tokens, --text and --jsonl more than one kind is given; pass one of them");
  TESSERA_CHECK(!needed || kinds == 1,
                "no data given; pass --tokens GLOB, --text FILE or --jsonl FILE (or --steps 0)");
  TESSERA_CHECK(o.eval_text.empty() || o.eval_tokens.empty(),
                "--eval-text and --eval-tokens are both given; pass one of them");
  TESSERA_CHECK(o.eval_every == 0 || !o.eval_text.empty() || !o.eval_tokens.empty(),
                "--eval-every is given without held-out data; pass --eval-text or --eval-tokens");
  TESSERA_CHECK(o.weights.empty() || o.weights.size() == o.tokens.size(), "--weight is given ",
                o.weights.size(), " times and --tokens ", o.tokens.size(),
                "; give a weight for each of them, or none");
  TESSERA_CHECK(
      std::isfinite(std::accumulate(o.weights.begin(), o.weights.end(), 0.0)),
      "the sum of all --weight is not finite; only their ratios count, give smaller ones");
}

}  // namespace llama
