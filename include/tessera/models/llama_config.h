// The configuration of a Llama, Mistral, Qwen 2 or Qwen 3. A setting of config.json that the model
// does not implement is an error: the computation would differ from the configuration.

#pragma once

#include <ATen/core/Tensor.h>
#include <utility>

#include <cstdint>
#include <filesystem>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::models {

/// "rope_scaling" of a config.json; the names are Hugging Face's.
struct RopeScaling {
  /// How the frequencies are scaled.
  enum class Kind {
    kNone,
    kLinear,   ///< all frequencies / factor (Chen et al. 2023)
    kDynamic,  ///< a larger theta, by the length of the sequence (NTK-aware)
    kLlama3,   ///< low frequencies / factor, a ramp to the high ones (Llama 3.1)
    kYarn,     ///< the ramp of Peng et al. 2023, and warmer attention
  };
  Kind kind = Kind::kNone;
  double factor = 1;
  /// The context of pretraining: beyond it the dynamic kind scales, and the others count turns in
  /// it.
  std::int64_t original_positions = 0;
  double low_freq_factor = 1, high_freq_factor = 4;  ///< of kLlama3
  double beta_fast = 32, beta_slow = 1;              ///< of kYarn: turns that bound the ramp
  bool truncate = true;                              ///< of kYarn: the bounds are whole
  double attention_factor = 1;                       ///< of kYarn: multiplies cos and sin

  bool operator==(const RopeScaling&) const = default;
};

/// A model's rotary embedding.
struct Rope {
  double theta = 10000;
  RopeScaling scaling;

  bool operator==(const Rope&) const = default;
  /// Whether the angles depend on how long the sequence is, for one of `length` tokens.
  bool depends_on_length(std::int64_t length) const {
    return scaling.kind == RopeScaling::Kind::kDynamic && length > scaling.original_positions;
  }
};

/// cos and sin of the angles of the positions [first, last) in a sequence of `length` tokens, twice
/// over for the two halves of a head: (last - first, head_dim) each, fp32, as Hugging Face computes
/// them.
std::pair<at::Tensor, at::Tensor> rope_tables(const Rope& rope, std::int64_t head_dim,
                                              std::int64_t first, std::int64_t last,
                                              std::int64_t length, c10::Device device);

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
  std::int64_t max_positions = 0;  ///< of the model, with or without scaling; 0: unknown
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;
  bool query_key_value_bias = false;
  bool attention_output_bias = false;
  bool mlp_bias = false;
  double attention_dropout = 0;     ///< in training; not implemented
  bool begins_texts = true;         ///< a text begins with the model's bos_token_id
  bool query_key_norm = false;      ///< RMSNorm of each head's queries and keys
  std::int64_t sliding_window = 0;  ///< how many positions a query sees, its own included; 0: all

  /// The text of the file, which exports write with the weights.
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
/// The number of ranks, of `tp`, that have each key-value head: 1 if heads are split.
std::int64_t key_value_copies(const LlamaConfig& config, std::int64_t tp);
/// A line about it for the start of a program: "key-value heads: 2 on 4 tensor-parallel ranks, each
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
