#include "examples/llama/train/options/data_options.h"

#include <CLI/CLI.hpp>
#include <cmath>
#include <numeric>

#include "examples/llama/cli.h"
#include "tessera/core/error.h"

namespace llama {

void declare_data(CLI::App& app, DataOptions& o) {
  // One value a flag, or a glob without quotes would take what follows it.
  app.add_option("--tokens", o.tokens,
                 "llm.c token shards; a glob, in quotes. Several are one sequence of all files, in "
                 "sorted order, or with --weight a mixture")
      ->option_text("GLOB")
      ->allow_extra_args(false);
  app.add_option("--weight", o.weights,
                 "How much of each batch is of a --tokens, against the others; one for each, in "
                 "their order")
      ->option_text("W")
      ->allow_extra_args(false)
      ->check(number_above_0());
  app.add_option("--text", o.text,
                 "A text file, tokenized here; several are one text, in the order given")
      ->option_text("FILE")
      ->allow_extra_args(false);
  app.add_option(
         "--jsonl", o.jsonl,
         "JSON objects, one a line, with a prompt and a completion, of which the loss is; a "
         "glob, in quotes, of files that may be gzip's or zstd's; may be given several "
         "times")
      ->option_text("GLOB")
      ->allow_extra_args(false);
  app.add_option("--prompt-field", o.prompt_field, "Of an object in --jsonl (prompt)");
  app.add_option("--completion-field", o.completion_field, "Of an object in --jsonl (completion)");
  add_switch(app, "--truncate", o.truncate,
             "Cut what is longer than --seq in --jsonl (an error without)");
  app.add_option("--tokenizer", o.tokenizer,
                 "tokenizer.json or tokenizer.model for --text and --jsonl (default: the model's "
                 "own, or bytes)")
      ->option_text("FILE|ORG/NAME")
      ->transform(hub_name(tessera::HubPart::kTokenizer));
  app.add_option(
         "--eval-text", o.eval_text,
         "Held-out text: its loss is printed at the end, beside its byte-bigram entropy; with "
         "--eval-every it is in the metrics and TensorBoard, too; several are one text")
      ->option_text("FILE")
      ->allow_extra_args(false);
  app.add_option("--eval-tokens", o.eval_tokens,
                 "The same of llm.c token shards; a glob, in quotes; the loss is a token's")
      ->option_text("GLOB")
      ->allow_extra_args(false);
  app.add_option("--shuffle", o.shuffle,
                 "Take the samples in an order of this seed, another in each pass over the data "
                 "(in the order of the data)")
      ->option_text("SEED")
      ->check(number_of_at_least_0());
  add_switch(app, "--document-mask", o.document_mask,
             "Tokens attend to their own document alone, and positions begin anew with each");
  app.add_option("--eos-token", o.eos_token,
                 "The token that ends a document or a completion (the tokenizer's or the model's)")
      ->option_text("ID")
      ->check(number_of_at_least_0());
}

std::vector<FlagUse> uses_of_data_flags(const DataOptions& o) {
  return {{"--weight", !o.tokens.empty(), "--tokens"},
          {"--prompt-field", !o.jsonl.empty(), "--jsonl"},
          {"--completion-field", !o.jsonl.empty(), "--jsonl"},
          {"--truncate", !o.jsonl.empty(), "--jsonl"},
          {"--document-mask", o.jsonl.empty(), "--tokens and --text"},
          {"--eos-token", o.document_mask || !o.jsonl.empty(), "--document-mask and --jsonl"}};
}

namespace {

/// Flags that are of another one.
void check_used(const CLI::App& app, const DataOptions& o) {
  for (const FlagUse& use : uses_of_data_flags(o)) {
    TESSERA_CHECK(use.used || app.get_option(use.flag)->count() == 0, use.flag,
                  " is given, but is for ", use.where, "; leave it out, or add one of these");
  }
}

}  // namespace

void check_data(const CLI::App& app, const DataOptions& o, bool needed) {
  const int kinds = static_cast<int>(!o.tokens.empty()) + static_cast<int>(!o.text.empty()) +
                    static_cast<int>(!o.jsonl.empty());
  TESSERA_CHECK(kinds <= 1,
                "of --tokens, --text and --jsonl more than one kind is given; pass one of them");
  TESSERA_CHECK(!needed || kinds == 1,
                "no data given; pass --tokens GLOB, --text FILE or --jsonl FILE (or --steps 0)");
  TESSERA_CHECK(o.eval_text.empty() || o.eval_tokens.empty(),
                "--eval-text and --eval-tokens are both given; pass one of them");
  check_used(app, o);
  TESSERA_CHECK(o.weights.empty() || o.weights.size() == o.tokens.size(), "--weight is given ",
                o.weights.size(), " times and --tokens ", o.tokens.size(),
                "; give a weight for each of them, or none");
  TESSERA_CHECK(
      std::isfinite(std::accumulate(o.weights.begin(), o.weights.end(), 0.0)),
      "the sum of all --weight is not finite; only their ratios count, give smaller ones");
}

}  // namespace llama
