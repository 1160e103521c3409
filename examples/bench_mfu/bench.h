// bench_mfu: model shapes, options, measurements and results.

#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bench {

/// A model configuration with published results.
struct Shape {
  std::string_view name;       ///< the shape's name, the value of --shape
  std::string_view config;     ///< the contents of the shape's config.json
  std::int64_t seq = 0;        ///< length of a sequence in tokens
  std::int64_t batch = 0;      ///< sequences per step and GPU
  std::string_view published;  ///< the published result: by whom, on which hardware, how fast
};

const std::vector<Shape>& shapes();
std::vector<std::string> shape_names();

/// The shape with the name `name`, which must exist.
const Shape& shape_of(std::string_view name);

/// The flags of bench_mfu; see bench_mfu --help.
struct BenchOptions {
  std::vector<std::string> configs, shapes, ac{"none"}, meshes{"1x1"};
  std::vector<std::int64_t> batches;  ///< batches to run; empty: the shapes' batches, 4 for a
                                      ///< config
  std::int64_t seq = 0;               ///< sequence length; 0: the shapes' lengths, 128 for a config
  std::int64_t steps = 6, warmup = 2;
  std::string device = "cpu", peak_flops = "measure";
  std::vector<std::string> flags;  ///< flags passed to llama_train unchanged
  std::string peer;                ///< the script that runs PyTorch's steps; "": none
  std::string out = "bench_mfu";
};

/// Throws tessera::Error for wrong flags.
BenchOptions parse_bench_options(std::vector<std::string> arguments);

/// The degrees of FSDP, context and tensor parallelism.
struct Degrees {
  std::int64_t dp = 1, cp = 1, tp = 1;

  std::int64_t ranks() const { return dp * cp * tp; }
};

/// One run of llama_train.
struct Trial {
  std::filesystem::path config;
  std::string ac;
  std::int64_t batch = 0;  ///< batch size over all ranks
  std::int64_t seq = 0;
  Degrees mesh{};

  /// The model's name: the name of its file, or of the folder for a file named config.json.
  std::string shape() const;
};
/// The path at which the config.json of a --shape is written.
std::filesystem::path config_of_shape(const BenchOptions& options, const std::string& name);

/// All combinations of configs and shapes, meshes, activation checkpointing, and batches, nested in
/// this order.
std::vector<Trial> trials_of(const BenchOptions& options);

/// The figures of a run: those of the step with the median time, without warm-up steps; memory is
/// the maximum over the steps. Fractions of the peak are in per cent; nullopt if unknown.
struct Figures {
  double step_time_s = 0;
  double tokens_per_s = 0;             ///< tokens per second over all ranks
  std::optional<double> peak_flops{};  ///< FLOP/s of one rank
  std::optional<double> mfu{};         ///< torchtitan: 6 (N - N_embedding) + 12 L H Q T per token
  std::optional<double> mfu_causal{};  ///< mfu with causal attention counted half
  std::optional<double> hfu{};         ///< FLOPs of all computed products, including recomputation
  std::optional<std::int64_t> active_bytes{};  ///< rank 0's peak memory in a step
  std::int64_t reserved_bytes = 0;
};

/// The figures of a trial's step on PyTorch.
struct PeerFigures {
  std::string name;  ///< how PyTorch ran: "eager", "compiled" or "compiled_without_fsdp"
  double step_time_s = 0, tokens_per_s = 0;
  std::string error{};  ///< why PyTorch gave no figures; "" if it did
};

/// The result of a trial.
struct Result {
  Trial trial;
  Figures figures{};
  std::vector<PeerFigures> peers{};  ///< PyTorch's figures; only with --peer
  std::string error{};               ///< why the shape has no figures; "" if it has figures
};

/// Runs a trial with llama_train and llama_plan from the folder of this program. Writes the output
/// files of these programs to `folder`. `tokens` is the token shard that the runs read.
Result measure(const Trial& trial, const BenchOptions& options, const std::filesystem::path& folder,
               const std::filesystem::path& tokens);

/// Writes a token shard with enough tokens for a step of each trial. Token ids are small, so that
/// every model has them.
void write_tokens(const std::filesystem::path& path, std::int64_t count);

/// The results as a table with one line per run.
std::string to_table(const std::vector<Result>& results);
/// The results of PyTorch (--peer) as text with one line per run.
std::string peers_text(const std::vector<Result>& results);
/// The results as JSON: {"runs": [{model, ac, batch, seq, dp, cp, tp, step_time_s, tokens_per_s,
/// peak_flops, mfu, mfu_causal, hfu, active_bytes, reserved_bytes, peer, error}]}; unknown values
/// are null. peer is {eager, compiled}, each with step_time_s and tokens_per_s, or error.
/// tools/tessera_plot.py mfu plots this file.
std::string to_json(const std::vector<Result>& results);
}  // namespace bench
