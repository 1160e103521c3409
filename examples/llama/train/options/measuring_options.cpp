#include "examples/llama/train/options/measuring_options.h"

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "examples/llama/cli.h"
#include "tessera/core/error.h"

namespace llama {
namespace {

/// A number that is too small is most likely one of TFLOP/s.
std::string check_peak(const std::string& text) {
  std::string number = text;
  const bool valid =
      text == "measure" || (is_decimal(text) && number_between(1e6, 1e18)(number).empty());
  return valid ? "" : text + " is neither measure nor a number of FLOP/s, such as 989e12";
}

}  // namespace

void declare_measuring(CLI::App& app, TrainOptions& o) {
  app.add_option(
         "--peak-flops", o.peak_flops,
         "What MFU is against: FLOP/s of a rank's device, or measure: those of a matrix "
         "product in --param-dtype, on all ranks at once (the data sheet's, for known GPUs)")
      ->option_text("X|measure")
      ->check(check_peak, "");
  app.add_option(
         "--eval-every", o.eval_every,
         "Evaluate the held-out data after every N steps as well: eval_loss of the metrics, "
         "and TensorBoard's validation_metrics/loss (at the end only)")
      ->option_text("N")
      ->check(number_above_0());
  app.add_option("--output-dir", o.output_dir,
                 "A new folder for the run: its resolved flags in config.toml, and by default what "
                 "--metrics, --tensorboard and, where it is used, --checkpoint name")
      ->option_text("DIR");
  app.add_option("--tensorboard", o.tensorboard,
                 "Write what TensorBoard shows, under torchtitan's names, to a new file in DIR")
      ->option_text("DIR");
}

std::vector<LeftOut> place_outputs(const CLI::App& app, TrainOptions& o) {
  if (o.output_dir.empty()) {
    return {};
  }
  std::vector<LeftOut> placed{{"output-dir", "another run needs another one"}};
  const auto place = [&](const char* flag, std::string& output, const char* name) {
    if (app.get_option(std::string("--") + flag)->count() == 0) {
      output = std::filesystem::path(o.output_dir) / name;
      placed.push_back({flag, "in --output-dir"});
    }
  };
  place("metrics", o.metrics, "metrics.jsonl");
  place("tensorboard", o.tensorboard, "tensorboard");
  const bool saves = o.checkpoint_every > 0 || o.keep > 0 || resumes(o);
  if (saves) {
    place("checkpoint", o.checkpoint, "checkpoints");
  }
  return placed;
}

void check_measuring(const TrainOptions& o) {
  TESSERA_CHECK(
      !o.verify || o.steps > 0,
      "--verify is given with --steps 0, which reads no data to verify with; take a step");
  TESSERA_CHECK(!o.verify || std::getenv("TESSERA_COMPARE") == nullptr,
                "--verify is given with TESSERA_COMPARE, which would record its step as the first; "
                "take one of them");
  TESSERA_CHECK(o.eval_every == 0 || !o.eval_text.empty() || !o.eval_tokens.empty(),
                "--eval-every is given without held-out data; pass --eval-text or --eval-tokens");
}

}  // namespace llama
