#include <CLI/CLI.hpp>

#include "examples/llama/cli.h"
#include "examples/llama/train/options/sections.h"
#include "tessera/core/error.h"

namespace llama {

void declare_model(CLI::App& app, TrainOptions& o) {
  app.option_defaults()->group("model");
  app.add_option("--model", o.model,
                 "Hugging Face folder: config.json and *.safetensors; or a name in the hub's cache")
      ->option_text("DIR|ORG/NAME")
      ->transform(hub_name(tessera::HubItem::kModel));
  app.add_option("--config", o.config, "config.json alone; weights are initialised from --seed")
      ->option_text("FILE|ORG/NAME")
      ->transform(hub_name(tessera::HubItem::kConfig));
  app.add_option("--tokenizer", o.tokenizer,
                 "tokenizer.json or tokenizer.model, for texts (the model's own, or bytes)")
      ->option_text("FILE|ORG/NAME")
      ->transform(hub_name(tessera::HubItem::kTokenizer));
  app.add_option("--dropout", o.dropout,
                 "Dropout of what attention and MLP add to the residual (0)")
      ->check(number_between(0.0, 0.999));
  app.add_option("--freeze", o.freeze,
                 "Parameters that are not trained: patterns of names, as \"model.embed_tokens.**\"")
      ->delimiter(',')
      ->option_text("PATTERN[,PATTERN]");
  app.add_option("--lora-rank", o.lora_rank,
                 "Train adapters of this rank beside the matrices (LoRA), and nothing else")
      ->check(number_above_0())
      ->option_text("R");
  app.add_option("--lora-alpha", o.lora_alpha, "Adapters are scaled by this / rank (the rank)")
      ->check(number_above_0())
      ->option_text("A");
  app.add_option("--lora-targets", o.lora_targets,
                 "Which matrices: patterns of their modules' names (model.layers.*.*.*_proj)")
      ->delimiter(',')
      ->option_text("PATTERN[,PATTERN]");
  app.add_option("--lora-dropout", o.lora_dropout, "Dropout of the adapters' input (0)")
      ->check(number_between(0.0, 0.999));
}

void check_fine_tuning(const TrainOptions& o) {
  TESSERA_CHECK(!o.merge_lora || !o.save_hf.empty(),
                "--merge-lora is given without --save-hf, which writes the merged weights; pass a "
                "folder for them");
  TESSERA_CHECK(
      o.save_lora.empty() || !o.model.empty() || !o.initial_load.empty() || !o.checkpoint.empty(),
      "--save-lora is given with --config, whose weights are drawn anew and saved "
      "nowhere, so that nobody could use the adapters; pass --model DIR");
  TESSERA_CHECK(o.lora_rank == 0 || o.save_hf.empty() || o.merge_lora,
                "--save-hf would write the weights as they were, without the adapters of "
                "--lora-rank; pass --merge-lora too, or --save-lora instead");
}

}  // namespace llama
