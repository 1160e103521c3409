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

/// Returns the path of a tokenizer's file. If `file` is a folder, returns the tokenizer's file in
/// this folder. If `file` is "", returns the tokenizer's file in the model's `folder`, or "" if the
/// model has no tokenizer. Any other `file` is returned unchanged.
std::string tokenizer_file(const std::string& file, const std::filesystem::path& folder);
/// Opens the tokenizer of `file` or, if `file` is "", of the model's folder. Without a tokenizer
/// file, a model that has 256 tokens or is untrained (`new_to_text`) gets the tokenizer with one
/// token per byte; for other models, open_tokenizer() throws Error. If the tokenizer has more
/// tokens than the model, encode() throws Error for a text with a token that the model lacks.
data::TokenizerPtr open_tokenizer(const std::string& file, const std::filesystem::path& folder,
                                  const LlamaConfig& config, bool new_to_text);

/// The tokens that begin and end a model's texts, according to Hugging Face's files.
struct SpecialTokens {
  std::vector<std::int64_t> begin;  ///< the token that begins a text; at most one
  std::vector<std::int64_t> end;    ///< each of these tokens ends a text; can be empty
};
/// Reads "eos_token_id" and, if `config.begins_texts`, "bos_token_id". Each id is read from
/// generation_config.json in `folder` or, if missing there, from config.json. Throws Error for an
/// id that is not a token of the model.
SpecialTokens read_special_tokens(const std::filesystem::path& folder, const LlamaConfig& config);

/// Returns the tokens that end a document in training data: the end_tokens() of the tokenizer; if
/// the tokenizer has none, the first end token of the model; if the model has none, no token.
/// `tokenizer` may be nullptr.
std::vector<std::int64_t> document_end(const data::Tokenizer* tokenizer,
                                       const SpecialTokens& special);
/// Returns the tokens at the beginning of a text that the model continues. The tokenizer's files
/// take precedence over `special`: if the files say whether texts have begin tokens, returns the
/// tokenizer's begin tokens or an empty list. Otherwise returns the begin tokens of `special`.
std::vector<std::int64_t> text_begin(const data::Tokenizer& tokenizer,
                                     const SpecialTokens& special);

}  // namespace tessera::models
TESSERA_API_END
