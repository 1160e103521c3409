#include "examples/llama/train/options/fine_tuning_options.h"

#include <CLI/CLI.hpp>
#include <vector>

#include "examples/llama/cli.h"
#include "tessera/core/error.h"

namespace llama {

void declare_fine_tuning(CLI::App& app, TrainOptions& o) {
  app.add_option("--freeze", o.freeze,
                 "Parameters that are not trained: patterns of their names, such as "
                 "\"model.embed_tokens.**\"")
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
  app.add_option("--save-lora", o.save_lora, "Write the adapters at the end in PEFT's form")
      ->option_text("DIR");
  add_switch(app, "--merge-lora", o.merge_lora, "Add the adapters to the weights of --save-hf");
}

std::vector<FlagUse> uses_of_fine_tuning_flags(const TrainOptions& o) {
  std::vector<FlagUse> uses;
  for (const char* flag :
       {"--lora-alpha", "--lora-targets", "--lora-dropout", "--save-lora", "--merge-lora"}) {
    uses.push_back({flag, o.lora_rank > 0, "--lora-rank"});
  }
  return uses;
}

void check_fine_tuning(const CLI::App& app, const TrainOptions& o) {
  for (const FlagUse& use : uses_of_fine_tuning_flags(o)) {
    TESSERA_CHECK(use.used || app.get_option(use.flag)->count() == 0, use.flag,
                  " is given without --lora-rank, and there are no adapters; pass their rank");
  }
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
