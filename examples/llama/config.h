#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace llama {

/// The shape of a Llama, as Hugging Face's config.json describes it.
struct Config {
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;

  /// The text it was read from, for writing it beside exported weights.
  std::string json;
};

/// Reads a config.json. Throws tessera::Error naming the key for a missing or impossible value, and
/// for every feature that would change the computation and is not implemented (rope scaling,
/// biases, another activation, another architecture, quantised weights).
Config read_config(const std::filesystem::path& file);
/// The same from its text; `origin` is named in errors.
Config parse_config(const std::string& json, const std::string& origin);

/// Throws Error if heads, key-value heads can't be split over `tp` ranks.
void check_tensor_parallel(const Config& config, std::int64_t tp);

/// Number of parameters, and how many of them are the token embedding.
struct ParameterCount {
  std::int64_t total = 0;
  std::int64_t embedding = 0;
};
ParameterCount count_parameters(const Config& config);

}  // namespace llama
