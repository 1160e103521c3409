// What a SentencePiece model is asked for. The library is linked to libtessera_sentencepiece.so
// alone, which is loaded when a model is opened: it and libc10 both export FLAGS_minloglevel, of
// other types, and in one scope of names its constructors write over libc10's memory.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

/// A loaded model. Its calls are const and safe for several threads.
class PieceModel {
 public:
  virtual ~PieceModel() = default;
  virtual int size() const = 0;
  virtual int id_of_unknown() const = 0;
  virtual int id_of_begin() const = 0;  ///< -1: none
  virtual int id_of_end() const = 0;    ///< -1: none
  virtual std::string piece(int id) const = 0;
  /// That of the unknown token for a text that is no piece.
  virtual int id(const std::string& piece) const = 0;
  /// Return what is wrong; "": nothing.
  virtual std::string encode(std::string_view text, std::vector<int>& ids) const = 0;
  virtual std::string decode(const std::vector<int>& ids, std::string& text) const = 0;
};

/// Loads a model from the bytes of its protobuf: nullptr, and what is wrong in `fault`, for others.
/// The one function of libtessera_sentencepiece.so.
using LoadPieceModel = PieceModel* (*)(const std::string& model, std::string& fault);
inline constexpr const char* kLoadPieceModel = "tessera_load_piece_model";

/// The same by that library. Throws Error where Tessera was built without SentencePiece.
std::unique_ptr<PieceModel> load_piece_model(const std::string& model, std::string& fault);

}  // namespace tessera::data
