#pragma once

// A SentencePiece model of a few pieces.
#include <cstring>
#include <string>

namespace tessera::data {

/// A protobuf field of bytes (all shorter than 128).
inline std::string Field(char number, const std::string& bytes) {
  return std::string{static_cast<char>(number << 3 | 2), static_cast<char>(bytes.size())} + bytes;
}

/// One entry of a SentencePiece model: piece, score, type (1 normal, 2 unknown, 3 control).
inline std::string Piece(const std::string& piece, float score, char type) {
  std::string number(4, '\0');
  std::memcpy(number.data(), &score, 4);
  return Field(1, Field(1, piece) + '\x15' + number + '\x18' + type);
}

/// Words of a and bc; "\xe2\x96\x81" is SentencePiece's mark of a word's begin.
inline std::string SmallModel() {
  return Piece("<unk>", 0, 2) + Piece("<s>", 0, 3) + Piece("</s>", 0, 3) +
         Piece(
             "\xe2\x96\x81"
             "a",
             -1, 1) +
         Piece(
             "\xe2\x96\x81"
             "b",
             -2, 1) +
         Piece("c", -3, 1);
}

}  // namespace tessera::data
