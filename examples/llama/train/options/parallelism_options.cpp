#include <CLI/CLI.hpp>
#include <cstdlib>

#include "examples/llama/cli.h"
#include "examples/llama/train/options/sections.h"
#include "tessera/core/error.h"

namespace llama {

void declare_parallelism(CLI::App& app, TrainOptions& o) {
  const CLI::Validator degree = number_between(1, kMaxDegree);
  app.option_defaults()->group("parallelism");
  app.add_option("--dp", o.dp, "FSDP degree (1); -1: what the other degrees leave of the ranks")
      ->check(CLI::Validator(
          [degree](std::string& text) { return text == "-1" ? "" : degree(text); }, ""));
  app.add_option("--tp", o.tp, "Tensor-parallel degree (1)")->check(degree);
  app.add_option("--cp", o.cp,
                 "Context-parallel degree (1): sequences are split over as many ranks")
      ->check(degree);
  app.add_option("--dp-replicate", o.dp_replicate, "Replicas of the mesh (1): HSDP")->check(degree);
  app.add_option("--zero", o.zero,
                 "3: free parameters between forward and backward; 2: keep them gathered (3)")
      ->check(CLI::IsMember({2, 3}));
  add_switch(app, "--reshard-last,!--no-reshard-last", o.reshard_last,
             "With --zero 3: free also the last block, final norm and head (off)");
  add_switch(app, "--sp,!--no-sp", o.sp,
             "Sequence parallelism between the blocks' halves (with tp > 1)");
  add_switch(
      app, "--sp-regather,!--no-sp-regather", o.sp_regather,
      "With --sp and --ac none: keep the blocks' inputs split, and gather them again in backward");
  add_switch(app, "--loss-parallel,!--no-loss-parallel", o.loss_parallel,
             "Keep the logits split over the vocabulary (with tp > 1)");
  app.add_option("--backend", o.backend, "gloo or nccl (gloo on CPU, nccl on CUDA)")
      ->check(CLI::IsMember({"gloo", "nccl"}));
  app.option_defaults()->group("activation_checkpoint");
  app.add_option("--ac", o.ac,
                 "Activation checkpointing: none; full: recompute the blocks; selective: all but "
                 "attention and half of the matrix products (none)")
      ->check(CLI::IsMember({"none", "full", "selective"}));
}

void check_parallelism(const TrainOptions& o) {
  // Sequences are dealt out evenly; a rank with fewer would make the mean of the ranks' means
  // another number than the mean.
  const std::int64_t parts = o.dp_replicate * std::abs(o.dp) * o.accumulate;
  TESSERA_CHECK(
      o.batch % parts == 0, "--batch ", o.batch, " is not a multiple of ",
      product_text(
          {{"--dp", o.dp}, {"--dp-replicate", o.dp_replicate}, {"--accumulate", o.accumulate}}),
      "; every micro-batch of every data-parallel rank takes the same number of sequences");
  TESSERA_CHECK(o.device == "cuda" || o.backend != "nccl",
                "--backend nccl needs --device cuda; on the CPU use gloo");
  TESSERA_CHECK(o.loss_parallel || o.loss_chunks.value_or(1) <= 1,
                "--no-loss-parallel gathers the logits, which --loss-chunks ", *o.loss_chunks,
                " leaves out; leave out one of them");
  TESSERA_CHECK(o.zero == 3 || !o.reshard_last,
                "--reshard-last is given with --zero 2, which keeps all parameters gathered; leave "
                "out one of them");
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

TrainOptions with_all_degrees(TrainOptions o, std::int64_t ranks) {
  if (o.dp > 0) {
    return o;
  }
  const std::int64_t others = o.dp_replicate * o.cp * o.tp;
  TESSERA_CHECK(ranks % others == 0,
                product_text({{"--tp", o.tp}, {"--cp", o.cp}, {"--dp-replicate", o.dp_replicate}}),
                " does not divide the ", ranks,
                " ranks that are running, of which --dp -1 takes the rest; start a multiple");
  o.dp = ranks / others;
  check_parallelism(o);
  return o;
}

}  // namespace llama
