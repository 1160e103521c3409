// The tokenizer of a model folder, and the tokens that begin and end its texts.

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

/// The tokenizer's file: `file`, or in it if it is a folder; for "" that in the model's folder; ""
/// where there is none either.
std::string tokenizer_file(const std::string& file, const std::filesystem::path& folder);
/// The tokenizer of a file; for "" that of the model's folder; where there is none either, or no
/// folder (""), that of bytes. `new_to_text`: the model has learnt no tokens yet, so that any will
/// do. Throws Error for bytes where the model's tokens are others; of a tokenizer of more
/// tokens than the model's, encode() does so for a text that has one of these.
data::TokenizerPtr open_tokenizer(const std::string& file, const std::filesystem::path& folder,
                                  const LlamaConfig& config, bool new_to_text);

/// The tokens that Hugging Face's files say begin and end a text of a model.
struct SpecialTokens {
  std::vector<std::int64_t> begin;  ///< at most one
  std::vector<std::int64_t> end;    ///< any of them; empty: none
};
/// "bos_token_id", if texts of the model begin with it, and "eos_token_id" of the folder's
/// generation_config.json, or of config.json where that has none. Throws Error for what is not a
/// token of the model.
SpecialTokens read_special_tokens(const std::filesystem::path& folder, const LlamaConfig& config);
/// The same of a folder with a config.json; none of another, or of "".
SpecialTokens special_tokens_of(const std::filesystem::path& folder);

/// The tokens that end a document in training data: the tokenizer's end_tokens(). If it has
/// none, the model's first one; if the model has none either, empty. `tokenizer` may be nullptr.
std::vector<std::int64_t> document_end(const data::Tokenizer* tokenizer,
                                       const SpecialTokens& special);
/// The tokens that a text begins with where the model continues it: the tokenizer's, or none, where
/// its files say which; else the model's.
std::vector<std::int64_t> text_begin(const data::Tokenizer& tokenizer,
                                     const SpecialTokens& special);

}  // namespace tessera::models
TESSERA_API_END
