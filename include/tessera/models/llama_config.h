// The model's configuration, of a Llama or of a model that is one but for what the options say.
// What a config.json says and this example does not implement is refused, because the model would
// otherwise train, or continue a text, by another computation than its configuration asks for.

#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "tessera/data/tokenizer.h"
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
  double attention_dropout = 0;     ///< of training, which is not implemented
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
LlamaConfig parse_config(const std::string& json, const std::string& origin);

/// The tokens that Hugging Face's files say begin and end a text of a model.
struct SpecialTokens {
  std::vector<std::int64_t> begin;  ///< at most one
  std::vector<std::int64_t> end;    ///< any of them; empty: none
};
/// "bos_token_id", if texts of the model begin with it, and "eos_token_id" of the folder's
/// generation_config.json, or of config.json where that has none. Throws Error for what is
/// not a token of the model.
SpecialTokens read_special_tokens(const std::filesystem::path& folder, const LlamaConfig& config);

/// The tokenizer's file: `file`, or in it if it is a folder; for "" that in the model's folder; ""
/// where there is none either.
std::string tokenizer_file(const std::string& file, const std::filesystem::path& folder);
/// The tokenizer of a file; for "" that of the model's folder; where there is none either, or no
/// folder (""), that of bytes. `new_to_text`: the model has learnt no tokens yet, so that any will
/// do. Throws Error for bytes where the model's tokens are others; of a tokenizer of more
/// tokens than the model's, encode() does so for a text that has one of these.
data::TokenizerPtr open_tokenizer(const std::string& file, const std::filesystem::path& folder,
                                  const LlamaConfig& config, bool new_to_text);
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
ParameterCount count_parameters(const LlamaConfig& config);

}  // namespace tessera::models
TESSERA_API_END
