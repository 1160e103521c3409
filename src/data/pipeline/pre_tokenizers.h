#pragma once

#include <c10/util/FunctionRef.h>

#include <memory>
#include <string_view>
#include <vector>

#include "pipeline/json_field.h"

namespace tessera::data {

/// A part of a text that is tokenized for itself.
struct Piece {
  std::string_view text;
  bool first = false;  ///< at the beginning of the whole text
};
using OnPiece = c10::function_ref<void(Piece)>;

/// A step that splits pieces. Immutable.
class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  /// From left to right. Valid UTF-8, but for pieces behind ByteLevel. What is handed out lives
  /// until the call of `on_piece` ends; empty pieces are left out.
  virtual void split(Piece piece, OnPiece on_piece) const = 0;
};

/// The steps in their order.
struct PreTokenizers {
  std::vector<std::unique_ptr<const PreTokenizer>> steps;
  bool byte_level = false;  ///< the model's tokens are bytes: ByteLevel is one of the steps

  void split(Piece piece, OnPiece on_piece) const { split_from(0, piece, on_piece); }

 private:
  void split_from(std::size_t step, Piece piece, OnPiece on_piece) const;
};

/// Those of a tokenizer.json's "pre_tokenizer". Throws Error for what is not implemented.
PreTokenizers read_pre_tokenizers(const JsonField& field);

/// A step that splits at the matches of an expression; matches are pieces themselves.
std::unique_ptr<const PreTokenizer> split_by_pattern(std::string_view expression);

}  // namespace tessera::data
