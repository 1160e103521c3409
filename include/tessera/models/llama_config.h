// The configuration of a Llama, Mistral, Qwen 2, Qwen 3, Mixtral, Qwen 3 MoE or OLMoE. Unsupported
// settings in config.json throw Error.

#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/models/detail/positions.h"

TESSERA_API_BEGIN
namespace tessera::models {

/// The architecture of a Llama, Mistral, Qwen 2, Qwen 3, Mixtral, Qwen 3 MoE or OLMoE, as in
/// Hugging Face's config.json.
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
  std::int64_t max_positions = 0;  ///< the model's context length in tokens; 0: unknown
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;
  bool query_key_value_bias = false;
  bool attention_output_bias = false;
  bool mlp_bias = false;
  double attention_dropout = 0;  ///< attention dropout in training; not implemented
  bool begins_texts = true;      ///< whether a text begins with the model's bos_token_id
  bool query_key_norm = false;   ///< whether each head's queries and keys have an RMSNorm
  /// Number of positions that a query attends to, including its own; 0: the query attends to all
  /// positions.
  std::int64_t sliding_window = 0;

  /// Number of experts in a mixture of experts; 0: every layer has one MLP.
  std::int64_t num_experts = 0;
  std::int64_t num_experts_per_tok = 0;    ///< number of experts that process each token
  std::int64_t moe_intermediate_size = 0;  ///< number of hidden features of each expert
  bool norm_topk_prob = true;  ///< whether a token's router weights are divided by their sum
  /// Coefficient of the load-balancing loss in training; 0 unless config.json has
  /// "output_router_logits", as in `transformers`.
  double router_aux_loss_coef = 0;
  std::vector<std::int64_t> dense_layers{};  ///< indices of layers without experts
  bool mixtral_names = false;    ///< whether the experts have Mixtral's names in weight files
  bool norm_over_heads = false;  ///< whether query_key_norm is over all heads together (OLMoE)

  /// The text of config.json. Exports write this text next to the weights.
  std::string json;
};

/// Reads a config.json. Throws Error, with the key, for a missing or impossible value, and for an
/// unsupported setting that changes the computation.
LlamaConfig read_config(const std::filesystem::path& file);
namespace detail {

/// Reads the text of a config.json, and throws the errors of read_config(). `origin`: the name of
/// the text in error messages.
LlamaConfig parse_config(const std::string& text, const std::string& origin);

}  // namespace detail

/// Throws Error unless the heads can be split over `tp` ranks, and the key-value heads can either
/// be split or each be copied to the same number of ranks.
void check_tensor_parallel(const LlamaConfig& config, std::int64_t tp);
/// Returns how many of the `tp` tensor-parallel ranks have a copy of each key-value head; 1 if the
/// key-value heads are split.
std::int64_t key_value_copies(const LlamaConfig& config, std::int64_t tp);
/// Returns a log line if several ranks copy a key-value head: "key-value heads: 2 on 4
/// tensor-parallel ranks, each on 2 of them". Otherwise returns "".
std::string describe_key_value_copies(const LlamaConfig& config, std::int64_t tp);

/// Numbers of parameters of a model: all parameters, those of the token embedding, and those that
/// one token uses.
struct ParameterCount {
  std::int64_t total = 0;
  std::int64_t embedding = 0;
  std::int64_t active = 0;  ///< number of parameters that one token uses
};
/// Whether the layer with index `layer` has a mixture of experts.
bool has_experts(const LlamaConfig& config, std::int64_t layer);
/// Counts the parameters of a model with the given configuration, without creating the model.
ParameterCount count_parameters(const LlamaConfig& config);

}  // namespace tessera::models
TESSERA_API_END
