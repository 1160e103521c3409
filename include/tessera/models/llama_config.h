// The configuration of a Llama, or of a model that is one but for what the options say. What a
// config.json says and Llama does not implement is refused, because the model would otherwise
// train, or continue a text, by another computation than its configuration asks for.

#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "tessera/export.h"
#include "tessera/models/rope.h"

TESSERA_API_BEGIN
namespace tessera::models {

/// The shape of a Llama, Mistral, Qwen 2 or Qwen 3, as Hugging Face's config.json describes it.
struct LlamaConfig {
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;
  double rms_norm_eps = 1e-6;
  Rope rope;
  std::int64_t max_positions = 0;  ///< that it was made for, by scaling or without; 0: not said
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;
  bool query_key_value_bias = false;
  bool attention_output_bias = false;
  bool mlp_bias = false;
  double attention_dropout = 0;     ///< in training; not implemented
  bool begins_texts = true;         ///< a text begins with the model's bos_token_id
  bool query_key_norm = false;      ///< RMSNorm of each head's queries and keys
  std::int64_t sliding_window = 0;  ///< how many positions a query sees, its own included; 0: all

  /// The text it was read from, for writing it beside exported weights.
  std::string json;
};

/// Reads a config.json. Throws Error naming the key for a missing or impossible value, and
/// for every feature that would change the computation and is not implemented (another activation,
/// another architecture, another rope scaling, quantised weights).
LlamaConfig read_config(const std::filesystem::path& file);
/// The same from its text; `origin` is named in errors.
LlamaConfig parse_config(const std::string& text, const std::string& origin);

/// Throws Error if heads can't be split over `tp` ranks, or key-value heads neither be split nor
/// each be on equally many of them.
void check_tensor_parallel(const LlamaConfig& config, std::int64_t tp);
/// On how many of `tp` ranks each key-value head is: 1 where they are split.
std::int64_t key_value_copies(const LlamaConfig& config, std::int64_t tp);
/// What to say of that when a program starts: "key-value heads: 2 on 4 tensor-parallel ranks, each
/// on 2 of them"; "" where they are split.
std::string describe_key_value_copies(const LlamaConfig& config, std::int64_t tp);

/// Number of parameters, and how many of them are the token embedding.
struct ParameterCount {
  std::int64_t total = 0;
  std::int64_t embedding = 0;
};
/// Those of a model of this shape; needs no model.
ParameterCount count_parameters(const LlamaConfig& config);

}  // namespace tessera::models
TESSERA_API_END
