#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace llama {

/// The flags of llama_train; see its --help.
struct TrainOptions {
  std::string model, config;
  std::uint64_t seed = 0;

  std::string tokens, text, tokenizer, eval_text;
  std::int64_t steps = 10, batch = 4, seq = 128, accumulate = 1;

  double lr = 1e-3, clip = 1.0, weight_decay = 0.1;
  std::string schedule = "constant";
  std::int64_t warmup = 0;

  std::int64_t dp_replicate = 1, dp = 1, tp = 1;
  bool sp = true, loss_parallel = true;
  int zero = 3;
  bool offload = false;
  std::string ac = "none";
  std::string param_dtype, reduce_dtype = "fp32";
  std::string device = "cpu", backend;

  std::string metrics, save_hf;
  std::int64_t log_every = 10;

  /// Name and value of every flag as given or defaulted, for the report.
  std::vector<std::pair<std::string, std::string>> listing;
};

/// "--dp 2 x --tp 2": degrees as the user would give them, those of 1 left out (but not all).
std::string product_text(const std::vector<std::pair<std::string, std::int64_t>>& degrees);

/// Throws tessera::Error for anything that can be told wrong without other ranks or files'
/// contents.
TrainOptions parse_train_options(std::vector<std::string> arguments);

}  // namespace llama
