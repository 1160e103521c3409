#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "examples/llama/texts/document_reader.h"
#include "examples/llama/tokenize/tokenize_options.h"
#include "tessera/data/tokenizer.h"

namespace llama {

/// From pieces to tokens. Immutable: threads share it.
struct PieceEncoder {
  tessera::data::TokenizerPtr tokenizer;
  std::vector<std::int64_t> begin, end;  ///< tokens around each document
  std::vector<std::string> files;        ///< for messages
  std::string field;                     ///< the one with the text, in JSONL objects

  /// None for a document without text. Throws Error, with file and line, for a line that is not an
  /// object with such a text.
  std::vector<std::int64_t> operator()(Piece piece) const;

 private:
  std::string text_of(Piece piece) const;
};

/// Throws tessera::Error where the tokenizer does not have what --bos, --eos and --eos-token ask
/// for.
PieceEncoder make_encoder(const TokenizeOptions& options, std::vector<std::string> files);

/// All that the shards depend on.
nlohmann::json describe(const TokenizeOptions& options, const PieceEncoder& encoder);

}  // namespace llama
