// What bench_mfu is to measure.

#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace bench {

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

}  // namespace bench
