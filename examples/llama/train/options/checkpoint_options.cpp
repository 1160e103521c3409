#include <CLI/CLI.hpp>
#include <utility>
#include <vector>

#include "examples/llama/cli.h"
#include "examples/llama/train/options/sections.h"
#include "tessera/core/error.h"

namespace llama {

void declare_checkpoint(CLI::App& app, TrainOptions& o) {
  app.option_defaults()->group("checkpoint");
  app.add_option("--checkpoint", o.checkpoint,
                 "Save all that training needs, at the end and at SIGTERM or SIGUSR1")
      ->option_text("DIR");
  app.add_option("--checkpoint-every", o.checkpoint_every, "And after every N steps")
      ->check(number_above_0());
  add_switch(app, "--async,!--no-async", o.async,
             "Write from a copy in the host's memory, while training continues");
  app.add_option("--keep", o.keep, "Checkpoints that are kept, at least 2 (all)")
      ->check(number_between(2, 1'000'000));
  app.add_option("--resume", o.resume,
                 "Go on from the newest step in --checkpoint; auto: or begin, if it is empty")
      ->option_text("[auto]")
      ->expected(0, 1)
      ->default_str("newest")
      ->check(CLI::IsMember({"newest", "auto"}));
  app.add_option("--resume-step", o.resume_step, "Go on from this step")
      ->check(number_of_at_least_0());
  app.add_option("--initial-load", o.initial_load,
                 "Begin with the state of another run's checkpoint; steps count from 0")
      ->option_text("DIR");
  app.add_option("--exclude", o.exclude,
                 "Leave out of what is loaded: optimizer, data (begin with other data), or both")
      ->delimiter(',')
      ->check(CLI::IsMember({"optimizer", "data"}));
  app.add_option("--save-hf", o.save_hf, "Write the weights at the end in Hugging Face's form")
      ->option_text("DIR");
  app.add_option("--save-hf-dtype", o.save_hf_dtype,
                 "Type of the weights of --save-hf: fp32, bf16 or fp16 (fp32)")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  app.add_option("--save-lora", o.save_lora, "Write the adapters at the end in PEFT's form")
      ->option_text("DIR");
  add_switch(app, "--merge-lora", o.merge_lora, "Add the adapters to the weights of --save-hf");
}

void check_checkpoints(const TrainOptions& o) {
  const std::vector<std::pair<const char*, bool>> of_folder{
      {"--checkpoint-every", o.checkpoint_every > 0},
      {"--keep", o.keep > 0},
      {"--no-async", !o.async},
      {"--resume", !o.resume.empty()},
      {"--resume-step", o.resume_step >= 0}};
  for (const auto& [name, given] : of_folder) {
    TESSERA_CHECK(!given || !o.checkpoint.empty(), name,
                  " is given without --checkpoint; pass the folder of the run's checkpoints");
  }
  TESSERA_CHECK(o.resume.empty() || o.resume_step < 0,
                "--resume and --resume-step are both given; pass one of them");
  // With --resume auto a run that is started again goes on with what it has saved.
  TESSERA_CHECK(o.initial_load.empty() || !resumes(o) || o.resume == "auto", "--initial-load and ",
                o.resume_step >= 0 ? "--resume-step" : "--resume",
                " are both given; a run begins with one of them");
  TESSERA_CHECK(
      o.checkpoint.empty() || o.steps > 0,
      "--checkpoint is given with --steps 0, which leaves nothing to save; give steps, or "
      "--initial-load to look at a checkpoint");
  TESSERA_CHECK(o.exclude.empty() || o.resume != "auto" || !o.initial_load.empty(),
                "--exclude is given with --resume auto, which would leave it out again at each "
                "start; pass it with --initial-load, or with --resume once");
  TESSERA_CHECK(o.exclude.empty() || resumes(o) || !o.initial_load.empty(),
                "--exclude is given, but nothing is loaded; pass --resume or --initial-load");
  TESSERA_CHECK(o.save_hf_dtype.empty() || !o.save_hf.empty(),
                "--save-hf-dtype is given without --save-hf; pass the folder of the weights");
}

}  // namespace llama
