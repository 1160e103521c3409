// bench_mfu: shapes of models, options, measurements and results.

#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bench {

/// What others have published for a model.
struct Shape {
  std::string_view name;       ///< the value of --shape
  std::string_view config;     ///< config.json
  std::int64_t seq = 0;        ///< tokens a sequence
  std::int64_t batch = 0;      ///< sequences a step and GPU
  std::string_view published;  ///< by whom, on what, and how fast
};

const std::vector<Shape>& shapes();
std::vector<std::string> shape_names();

/// The shape of that name, which must be one.
const Shape& shape_of(std::string_view name);

/// The flags of bench_mfu; see its --help.
struct BenchOptions {
  std::vector<std::string> configs, shapes, ac{"none"}, meshes{"1x1"};
  std::vector<std::int64_t> batches;  ///< empty: those of the shapes, 4 of a config
  std::int64_t seq = 0;               ///< 0: those of the shapes, 128 of a config
  std::int64_t steps = 6, warmup = 2;
  std::string device = "cpu", peak_flops = "measure";
  std::vector<std::string> flags;  ///< passed to llama_train unchanged
  std::string peer;                ///< the script that runs PyTorch's steps; "": none
  std::string out = "bench_mfu";
};

/// Throws tessera::Error.
BenchOptions parse_bench_options(std::vector<std::string> arguments);

/// The degrees of FSDP, context and tensor parallelism.
struct Degrees {
  std::int64_t dp = 1, cp = 1, tp = 1;

  std::int64_t ranks() const { return dp * cp * tp; }
};

/// One run.
struct Trial {
  std::filesystem::path config;
  std::string ac;
  std::int64_t batch = 0;  ///< over all ranks
  std::int64_t seq = 0;
  Degrees mesh{};

  /// The model's name: that of the file, or of the folder of a config.json.
  std::string shape() const;
};
/// Where the config.json of a shape of --shape is written.
std::filesystem::path config_of_shape(const BenchOptions& options, const std::string& name);

/// All combinations: configs and shapes, then meshes, activation checkpointing, batches.
std::vector<Trial> trials_of(const BenchOptions& options);

/// The figures of the step with the median time, among those that count; memory: their maximum.
/// Shares of the peak are in per cent; nullopt where it is not known.
struct Figures {
  double step_time_s = 0;
  double tokens_per_s = 0;             ///< of the whole job
  std::optional<double> peak_flops{};  ///< FLOP/s of a rank
  std::optional<double> mfu{};         ///< torchtitan: 6 (N - N_embedding) + 12 L H Q T a token
  std::optional<double> mfu_causal{};  ///< the same with half of the attention
  std::optional<double> hfu{};         ///< all products that are made, those made again too
  std::optional<std::int64_t> active_bytes{};  ///< the most that rank 0 has in a step
  std::int64_t reserved_bytes = 0;
};

/// The same step on PyTorch.
struct PeerFigures {
  std::string name;  ///< "eager" or "compiled"
  double step_time_s = 0, tokens_per_s = 0;
  std::string error{};  ///< why there are no figures; "" if there are
};

/// What came of a trial.
struct Result {
  Trial trial;
  Figures figures{};
  std::vector<PeerFigures> peers{};  ///< with --peer
  std::string error{};               ///< why there are no figures; "" if there are
};

/// Runs the programs that are beside this one; their files go to `folder`. `tokens`: token shard
/// that the runs read.
Result measure(const Trial& trial, const BenchOptions& options, const std::filesystem::path& folder,
               const std::filesystem::path& tokens);

/// A shard of enough tokens for a step of each trial: small numbers, which all models know.
void write_tokens(const std::filesystem::path& path, std::int64_t count);

/// A line of each run, in columns.
std::string to_table(const std::vector<Result>& results);
/// With --peer a line for each of PyTorch's runs.
std::string peers_text(const std::vector<Result>& results);
/// {"runs": [{model, ac, batch, seq, dp, cp, tp, step_time_s, tokens_per_s, peak_flops, mfu,
/// mfu_causal, hfu, active_bytes, reserved_bytes, peer, error}]}; null is what is not known. peer:
/// {eager, compiled}, with step_time_s and tokens_per_s, or error. tools/tessera_plot.py mfu draws
/// it.
std::string to_json(const std::vector<Result>& results);
}  // namespace bench
