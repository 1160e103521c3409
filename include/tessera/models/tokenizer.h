#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "tessera/data/tokenizer.h"
#include "tessera/export.h"
#include "tessera/models/llama_config.h"

TESSERA_API_BEGIN
namespace tessera::models {

/// read_special_tokens() of a folder with a config.json; none of another, or of "".
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
