#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdlib>
#include <string>
#include <string_view>

#include "examples/llama/cli.h"
#include "examples/llama/train/options/sections.h"
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

void declare_job(CLI::App& app, TrainOptions& o) {
  app.add_option("--output-dir", o.output_dir,
                 "A new folder for the run: config.toml with all flags, metrics, checkpoints")
      ->option_text("DIR");
  add_switch(app, "--verify", o.verify,
             "Before the first step compare a sample of each data-parallel rank with what one rank "
             "computes");
}

void declare_profiling(CLI::App& app, TrainOptions& o) {
  app.add_option("--trace", o.trace,
                 "Write what each rank does in some steps, and waits for, as a Chrome trace")
      ->option_text("FILE.json");
  app.add_option("--trace-steps", o.trace_steps,
                 "The steps of --trace, both included (the second of this run)")
      ->option_text("A:B");
  app.add_option(
         "--profile", o.profile,
         "Write what libtorch's profiler sees of rank 0 in the last step, as a Chrome trace")
      ->option_text("FILE.json");
  app.add_option(
         "--memory-report", o.memory_report,
         "Write what tensors took in the step that took the most, by rank, FSDP unit and kind")
      ->option_text("FILE.json");
}

}  // namespace

void declare_metrics(CLI::App& app, TrainOptions& o) {
  app.option_defaults()->group("metrics");
  app.add_option("--metrics", o.metrics, "A JSON object a step; report.html is written beside it")
      ->option_text("FILE.jsonl");
  app.add_option("--tensorboard", o.tensorboard,
                 "Write TensorBoard's files, with torchtitan's names")
      ->option_text("DIR");
  app.add_option("--log-every", o.log_every, "Steps between console lines (10)")
      ->check(number_above_0());
  app.add_option("--peak-flops", o.peak_flops,
                 "What MFU is against: a device's FLOP/s, or measure: those of a matrix product "
                 "here (the data sheet's, for known GPUs)")
      ->option_text("X|measure")
      ->check(check_peak, "");
  app.option_defaults()->group("profiling");
  declare_profiling(app, o);
  app.option_defaults()->group("job");
  declare_job(app, o);
}

std::pair<std::int64_t, std::int64_t> parse_step_range(const std::string& text) {
  const auto number = [](std::string_view digits) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    const bool whole = error == std::errc() && end == digits.data() + digits.size();
    return whole ? value : std::int64_t{0};
  };
  const std::size_t colon = text.find(':');
  const std::int64_t first = number(std::string_view(text).substr(0, colon));
  const std::int64_t last =
      colon == std::string::npos ? 0 : number(std::string_view(text).substr(colon + 1));
  TESSERA_CHECK(first >= 1 && first <= last, "--trace-steps ", text,
                " is no range of steps; give A:B with 1 <= A <= B, such as 2:3");
  return {first, last};
}

void check_metrics(const TrainOptions& o) {
  TESSERA_CHECK(
      !o.verify || o.steps > 0,
      "--verify is given with --steps 0, which reads no data to verify with; take a step");
  TESSERA_CHECK(!o.verify || std::getenv("TESSERA_COMPARE") == nullptr,
                "--verify is given with TESSERA_COMPARE, which would record its step as the first; "
                "take one of them");
  if (o.trace_steps.empty()) {
    return;
  }
  TESSERA_CHECK(!o.trace.empty(),
                "--trace-steps is given without --trace; pass the file of the trace");
  TESSERA_CHECK(parse_step_range(o.trace_steps).second <= o.steps, "--trace-steps ", o.trace_steps,
                " ends after --steps ", o.steps, "; name steps that the run makes");
}

}  // namespace llama
