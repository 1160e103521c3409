// The source of libtessera_sentencepiece.so: see piece_model.h.

#include <sentencepiece_processor.h>

#include <exception>
#include <memory>

#include "piece_model.h"
#include "tessera/export.h"

namespace tessera::data {
namespace {

std::string fault_of(const sentencepiece::util::Status& status) {
  return status.ok() ? "" : status.ToString();
}

class LibraryModel final : public PieceModel {
 public:
  /// Loads a SentencePiece model. Returns the error as text; "" if there is no error. SentencePiece
  /// reports some errors by exceptions, which load() catches.
  std::string load(const std::string& model) {
    try {
      return fault_of(processor_.LoadFromSerializedProto(model));
    } catch (const std::exception& error) {
      return error.what();
    }
  }

  int size() const override { return processor_.GetPieceSize(); }
  int id_of_unknown() const override { return processor_.unk_id(); }
  int id_of_begin() const override { return processor_.bos_id(); }
  int id_of_end() const override { return processor_.eos_id(); }
  std::string piece(int id) const override { return processor_.IdToPiece(id); }
  int id(const std::string& piece) const override { return processor_.PieceToId(piece); }
  std::string encode(std::string_view text, std::vector<int>& ids) const override {
    return fault_of(processor_.Encode(text, &ids));
  }
  std::string decode(const std::vector<int>& ids, std::string& text) const override {
    return fault_of(processor_.Decode(ids, &text));
  }

 private:
  sentencepiece::SentencePieceProcessor processor_;
};

}  // namespace
}  // namespace tessera::data

extern "C" TESSERA_API tessera::data::PieceModel* tessera_load_piece_model(const std::string& model,
                                                                           std::string& fault) {
  auto loaded = std::make_unique<tessera::data::LibraryModel>();
  fault = loaded->load(model);
  return fault.empty() ? loaded.release() : nullptr;
}
