#include "examples/llama/tokenize/piece_encoder.h"

#include <string_view>
#include <utility>

#include "tessera/data/json_lines.h"

namespace llama {
namespace {

/// Cut as a text file is, so that no more memory is needed for it.
void encode_long(const tessera::data::Tokenizer& tokenizer, std::string_view text,
                 std::vector<std::int64_t>& tokens) {
  while (!text.empty()) {
    const std::size_t bytes =
        text.size() > kPieceBytes ? cut_of(text.substr(0, kPieceBytes + 1)) : text.size();
    const std::vector<std::int64_t> some = tokenizer.encode(text.substr(0, bytes));
    // As many of each piece: a vector that doubles would take three times as much.
    tokens.reserve(tokens.size() + some.size() * ((text.size() + bytes - 1) / bytes));
    tokens.insert(tokens.end(), some.begin(), some.end());
    text.remove_prefix(bytes);
  }
}

}  // namespace

/// The piece is freed when its text is known.
std::string PieceEncoder::text_of(Piece piece) const {
  if (!piece.is_json) {
    return std::move(piece.text);
  }
  const std::string origin = files[piece.place.file] + ":" + std::to_string(piece.place.line);
  return std::move(tessera::data::json_texts(piece.text, {field}, origin).front());
}

std::vector<std::int64_t> PieceEncoder::operator()(Piece piece) const {
  const bool begins = piece.begins;
  const bool ends = piece.ends;
  const std::string text = text_of(std::move(piece));
  std::vector<std::int64_t> tokens;
  if (text.empty()) {
    return tokens;
  }
  if (begins) {
    tokens = begin;
  }
  encode_long(*tokenizer, text, tokens);
  if (ends) {
    tokens.insert(tokens.end(), end.begin(), end.end());
  }
  return tokens;
}

}  // namespace llama
