// One run of llama_train, and what of its metrics counts.

#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "examples/bench_mfu/bench_options.h"

namespace bench {

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

}  // namespace bench
