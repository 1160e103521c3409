#pragma once

#include <optional>
#include <string>

#include "tessera/data/tokenizer.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// The tokenizer with one token per byte: a vocabulary of 256.
TokenizerPtr byte_tokenizer();

/// Returns the file that open_tokenizer() opens in a folder.
std::optional<std::string> find_tokenizer(const std::string& folder);

/// Opens a SentencePiece model file. Throws Error if the file cannot be read, or if Tessera was
/// built without the SentencePiece library.
TokenizerPtr sentencepiece_tokenizer(const std::string& path);
/// Opens Hugging Face's tokenizer.json with a BPE model. Token ids equal those of the `tokenizers`
/// package. Throws Error if the file cannot be read, and for processing steps that are not
/// implemented (docs/data.md).
TokenizerPtr hugging_face_tokenizer(const std::string& path);

}  // namespace tessera::data
TESSERA_API_END
