#include <CLI/CLI.hpp>

#include "examples/llama/cli.h"
#include "examples/llama/train/options/sections.h"

namespace llama {

void declare_optimizer(CLI::App& app, TrainOptions& o) {
  app.option_defaults()->group("optimizer");
  app.add_option("--optimizer", o.optimizer,
                 "adamw, sgd, or muon for the blocks' matrices with adamw for the rest (adamw)")
      ->check(CLI::IsMember({"adamw", "sgd", "muon"}));
  app.add_option("--lr", o.lr, "Peak learning rate (1e-3)")->check(number_of_at_least_0());
  app.add_option("--betas", o.betas, "AdamW's decay rates of its two means (0.9,0.95)")
      ->delimiter(',')
      ->expected(2)
      ->option_text("B1,B2")
      ->check(number_between(0.0, 0.999999));
  // Below it there is no normal number of fp32.
  app.add_option("--eps", o.eps, "What AdamW adds to a root (1e-8)")
      ->check(number_between(1.2e-38, 1e38));
  app.add_option("--moment-dtype", o.moment_dtype,
                 "Type of AdamW's two means: fp32, or bf16 rounded at random (fp32)")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--momentum", o.momentum, "The momentum of sgd and muon (0.95)")
      ->check(number_between(0.0, 0.9999));
  app.add_option("--weight-decay", o.weight_decay, "The optimizer's, on every parameter (0.1)")
      ->check(number_of_at_least_0());
  add_switch(app, "--decay-matrices-only", o.decay_matrices_only,
             "No weight decay of norms and biases");
  app.add_option(
         "--ema", o.ema,
         "Keep an average of the weights with this decay, for evaluation and what is saved (none)")
      ->check(number_between(0.0, 0.999999));
  app.option_defaults()->group("lr_scheduler");
  app.add_option("--schedule", o.schedule,
                 "constant, cosine, linear or wsd: stable, then linear (constant)")
      ->check(CLI::IsMember({"constant", "cosine", "linear", "wsd"}));
  app.add_option("--warmup", o.warmup, "Steps of linear warm-up (0)")
      ->check(number_of_at_least_0());
  app.add_option("--min-lr", o.min_lr, "What a falling schedule ends at (0)")
      ->check(number_of_at_least_0());
  app.add_option("--decay-ratio", o.decay_ratio, "The share of the steps in which wsd falls (0.2)")
      ->check(number_between(0.0, 1.0));
}

}  // namespace llama
