#include "examples/llama/train/options/observation_options.h"

#include <CLI/CLI.hpp>
#include <charconv>
#include <string_view>
#include <utility>

#include "tessera/core/error.h"

namespace llama {

void declare_observation(CLI::App& app, TrainOptions& o) {
  app.add_option("--trace", o.trace,
                 "Write what each rank does in some steps as a Chrome trace: modules, collectives, "
                 "and what is waited for")
      ->option_text("FILE.json");
  app.add_option("--trace-steps", o.trace_steps,
                 "The steps of --trace, both included (the second of this run)")
      ->option_text("A:B");
  app.add_option("--profile", o.profile,
                 "Write what rank 0 does in the last step as libtorch's profiler sees it, as a "
                 "Chrome trace: operators and, on CUDA, kernels")
      ->option_text("FILE.json");
  app.add_option(
         "--memory-report", o.memory_report,
         "Write at the end what tensors took in the step that took the most, by rank and, on "
         "a CPU, by FSDP unit and kind; on CUDA the two peaks that libtorch's allocator has")
      ->option_text("FILE.json");
}

StepRange parse_step_range(const std::string& text) {
  const auto number = [](std::string_view digits) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    const bool whole = error == std::errc() && end == digits.data() + digits.size();
    return whole ? value : std::int64_t{0};
  };
  const std::size_t colon = text.find(':');
  const StepRange range{number(std::string_view(text).substr(0, colon)),
                        colon == text.npos ? 0 : number(std::string_view(text).substr(colon + 1))};
  TESSERA_CHECK(range.first >= 1 && range.first <= range.last, "--trace-steps ", text,
                " is no range of steps; give A:B with 1 <= A <= B, such as 2:3");
  return range;
}

void check_observation(const TrainOptions& o) {
  if (o.trace_steps.empty()) {
    return;
  }
  TESSERA_CHECK(!o.trace.empty(),
                "--trace-steps is given without --trace; pass the file of the trace");
  const StepRange range = parse_step_range(o.trace_steps);
  TESSERA_CHECK(range.last <= o.steps, "--trace-steps ", o.trace_steps, " ends after --steps ",
                o.steps, "; name steps that the run makes");
}

}  // namespace llama
