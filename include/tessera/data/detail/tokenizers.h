#pragma once

#include <optional>
#include <string>

#include "tessera/data/tokenizer.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// Returns the tokenizer with one token per byte: a vocabulary of 256.
TokenizerPtr byte_tokenizer();

/// Returns the path of the file that open_tokenizer() opens in a folder.
std::optional<std::string> find_tokenizer(const std::string& folder);

/// Opens a SentencePiece model file. Throws Error if the file cannot be read, or if Tessera was
/// built without the SentencePiece library.
TokenizerPtr sentencepiece_tokenizer(const std::string& path);
/// Opens the tokenizer.model of Llama 3 to 3.3, in the format of the `tiktoken` package. Throws
/// Error if the file cannot be read or, unless `any_size`, has another number of tokens than Llama
/// 3.
TokenizerPtr tiktoken_tokenizer(const std::string& path, bool any_size = false);

}  // namespace tessera::data
TESSERA_API_END
