// The tokenizer of a model folder, and the tokens that begin and end the model's texts.

#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tessera/data/tokenizer.h"
#include "tessera/export.h"
#include "tessera/models/llama_config.h"

TESSERA_API_BEGIN
namespace tessera::models {

/// Returns the path of a tokenizer's file. `file`: a file, a folder with the tokenizer, or "" for
/// the model's `folder`. Returns "" if the model has no tokenizer.
std::string tokenizer_file(const std::string& file, const std::filesystem::path& folder);
/// Opens the tokenizer of `file` or, if `file` is "", of the model's folder. Without a file, an
/// untrained model (`new_to_text`) or a model with 256 tokens gets one token per byte. Throws Error
/// for other models. encode() throws Error for a token that the model lacks.
data::TokenizerPtr open_tokenizer(const std::string& file, const std::filesystem::path& folder,
                                  const LlamaConfig& config, bool new_to_text);

/// The tokens that begin and end a model's texts, according to Hugging Face's files.
struct SpecialTokens {
  std::vector<std::int64_t> begin;  ///< the token that begins a text; at most one
  std::vector<std::int64_t> end;    ///< each of these tokens ends a text; can be empty
};
/// Reads "eos_token_id" and, if `config.begins_texts`, "bos_token_id" from generation_config.json
/// in `folder`, or from config.json if generation_config.json lacks the key. Throws Error for an id
/// that is not a token of the model.
SpecialTokens read_special_tokens(const std::filesystem::path& folder, const LlamaConfig& config);

/// Returns the tokens that end a document in training data: end_tokens() of the tokenizer or else
/// the model's first end token. Returns no token if both are missing. `tokenizer` may be nullptr.
std::vector<std::int64_t> document_end(const data::Tokenizer* tokenizer,
                                       const SpecialTokens& special);
/// Returns the begin tokens of a text that the model continues. The tokenizer's files decide
/// whether texts have begin tokens; if the files do not say, returns the begin tokens of `special`.
std::vector<std::int64_t> text_begin(const data::Tokenizer& tokenizer,
                                     const SpecialTokens& special);

}  // namespace tessera::models
TESSERA_API_END
