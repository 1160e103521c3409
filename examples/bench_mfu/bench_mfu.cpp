// Measures the model FLOPs utilization of training over shapes, meshes, activation checkpointing
// and batches. Each run is a separate process, so that a run that is out of memory does not end the
// others.

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "examples/bench_mfu/bench.h"
#include "examples/llama/cli.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"

namespace {

using namespace bench;

/// The maximum number of tokens in the token file, which every run reads completely.
constexpr std::int64_t kMostTokens = std::int64_t{1} << 28;

std::int64_t tokens_needed(const std::vector<Trial>& trials) {
  std::int64_t most = 0;
  for (const Trial& trial : trials) {
    TESSERA_CHECK(trial.batch <= kMostTokens / trial.seq, "--batch ", trial.batch, " of --seq ",
                  trial.seq, " is more than ", kMostTokens, " tokens a step; take fewer");
    most = std::max(most, trial.batch * trial.seq);
  }
  return most + 1;
}

void write_shapes(const BenchOptions& options) {
  for (const std::string& name : options.shapes) {
    const std::filesystem::path config = config_of_shape(options, name);
    tessera::files::create_folders(config.parent_path());
    tessera::files::write_file(config, std::string(shape_of(name).config));
  }
}

std::string published(const BenchOptions& options) {
  std::string text;
  for (const std::string& name : options.shapes) {
    text += "published, " + name + ": " + std::string(shape_of(name).published) + "\n";
  }
  return text;
}

/// With --peak-flops measure, the first run for each number of ranks measures the peak FLOP/s, and
/// later runs reuse the result: a new measurement would vary with the machine's load.
class Peaks {
 public:
  BenchOptions options_of(const Trial& trial, BenchOptions options) const {
    const auto known = by_ranks_.find(trial.mesh.ranks());
    if (options.peak_flops == "measure" && known != by_ranks_.end()) {
      options.peak_flops = llama::number_text(known->second);
    }
    return options;
  }
  void add(const Result& result) {
    if (result.figures.peak_flops) {
      by_ranks_.try_emplace(result.trial.mesh.ranks(), *result.figures.peak_flops);
    }
  }

 private:
  std::map<std::int64_t, double> by_ranks_;
};

int measure_all(std::vector<std::string> arguments) {
  const BenchOptions options = parse_bench_options(std::move(arguments));
  const std::vector<Trial> trials = trials_of(options);
  const std::filesystem::path out = options.out;
  tessera::files::create_folders(out);
  const std::filesystem::path tokens = out / "tokens.bin";
  write_shapes(options);
  write_tokens(tokens, tokens_needed(trials));
  std::vector<Result> results;
  Peaks peaks;
  for (const Trial& trial : trials) {
    const std::filesystem::path folder = out / ("run-" + std::to_string(results.size() + 1));
    std::cerr << folder.string() << " of " << trials.size() << std::endl;
    results.push_back(measure(trial, peaks.options_of(trial, options), folder, tokens));
    peaks.add(results.back());
    // Results are written after each trial, so that earlier results survive an interruption.
    tessera::files::write_file(out / "results.json", to_json(results));
  }
  std::cout << to_table(results) << peers_text(results) << published(options)
            << "written: " << (out / "results.json").string() << std::endl;
  const auto failed = [](const Result& result) { return !result.error.empty(); };
  return std::ranges::any_of(results, failed) ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  return llama::run_program("bench_mfu", argc, argv, measure_all);
}
