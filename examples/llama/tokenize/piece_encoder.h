#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "examples/llama/texts/document_reader.h"
#include "tessera/data/tokenizer.h"

namespace llama {

/// From pieces to tokens. Immutable: threads share it.
struct PieceEncoder {
  tessera::data::TokenizerPtr tokenizer;
  std::vector<std::int64_t> begin, end;  ///< of documents
  std::vector<std::string> files;        ///< for messages
  std::string field;                     ///< of objects in JSONL

  /// None for a document without text. Throws Error, with file and line, for a line that is not an
  /// object with such a text.
  std::vector<std::int64_t> operator()(Piece piece) const;

 private:
  std::string text_of(Piece piece) const;
};

}  // namespace llama
