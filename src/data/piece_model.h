// The interface to a SentencePiece model. Only libtessera_sentencepiece.so links SentencePiece,
// because SentencePiece and libc10 export FLAGS_minloglevel with different types. In one symbol
// scope, SentencePiece would overwrite libc10's memory.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

/// A loaded SentencePiece model, whose functions are thread safe.
class PieceModel {
 public:
  virtual ~PieceModel() = default;
  virtual int size() const = 0;
  virtual int id_of_unknown() const = 0;
  virtual int id_of_begin() const = 0;  ///< id of the begin token; -1 if there is none
  virtual int id_of_end() const = 0;    ///< id of the end token; -1 if there is none
  virtual std::string piece(int id) const = 0;
  /// Returns the id of a piece (token text), or of the unknown token if there is no such piece.
  virtual int id(const std::string& piece) const = 0;
  /// encode() and decode() return an error message, or "" if they succeed.
  virtual std::string encode(std::string_view text, std::vector<int>& ids) const = 0;
  virtual std::string decode(const std::vector<int>& ids, std::string& text) const = 0;
};

/// The name of the only function that libtessera_sentencepiece.so exports. The function loads a
/// model from a protobuf. If loading fails, the function returns nullptr and sets `fault`.
using LoadPieceModel = PieceModel* (*)(const std::string& model, std::string& fault);
inline constexpr const char* kLoadPieceModel = "tessera_load_piece_model";

}  // namespace tessera::data
