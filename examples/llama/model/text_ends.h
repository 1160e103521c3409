#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "examples/llama/model/config.h"
#include "tessera/data/tokenizer.h"

namespace llama {

/// read_special_tokens() of a folder with a config.json; none of another, or of "".
SpecialTokens special_tokens_of(const std::filesystem::path& folder);

/// The token that ends a document in training data: the tokenizer's end_token(), or else the first
/// of the model's. `tokenizer` may be nullptr.
std::optional<std::int64_t> document_end(const tessera::data::Tokenizer* tokenizer,
                                         const SpecialTokens& special);

/// The token that a text begins with where the model continues it: the tokenizer's, or none, where
/// its files say which; else the model's.
std::optional<std::int64_t> text_begin(const tessera::data::Tokenizer& tokenizer,
                                       const SpecialTokens& special);

}  // namespace llama
