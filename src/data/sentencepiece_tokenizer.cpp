#include <sentencepiece_processor.h>

#include <filesystem>

#include "tessera/core/error.h"
#include "tessera/data/tokenizer.h"

namespace tessera::data {
namespace {

class SentencePieceTokenizer final : public Tokenizer {
 public:
  explicit SentencePieceTokenizer(const std::string& path) {
    // The library logs to stderr before it returns a status, so common mistakes are found first.
    TESSERA_CHECK(std::filesystem::is_regular_file(path), "there is no tokenizer file '", path,
                  "': give a SentencePiece model (tokenizer.model)");
    const auto status = processor_.Load(path);
    TESSERA_CHECK(status.ok(), "'", path, "' is not a SentencePiece model (", status.ToString(),
                  "): give a tokenizer.model");
  }

  std::int64_t vocabulary() const override { return processor_.GetPieceSize(); }

  std::vector<std::int64_t> encode(std::string_view text) const override {
    std::vector<int> ids;
    const auto status = processor_.Encode(text, &ids);
    TESSERA_CHECK(status.ok(), "SentencePiece cannot encode the text: ", status.ToString());
    return {ids.begin(), ids.end()};
  }

  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    for (const auto token : tokens) {
      TESSERA_CHECK(token >= 0 && token < vocabulary(), "token ", token,
                    " is outside the tokenizer's vocabulary of ", vocabulary(),
                    ": decode with the tokenizer that made it");
    }
    std::string text;
    const auto status = processor_.Decode(std::vector<int>(tokens.begin(), tokens.end()), &text);
    TESSERA_CHECK(status.ok(), "SentencePiece cannot decode the tokens: ", status.ToString());
    return text;
  }

  std::optional<std::int64_t> begin_token() const override { return present(processor_.bos_id()); }
  std::optional<std::int64_t> end_token() const override { return present(processor_.eos_id()); }

 private:
  static std::optional<std::int64_t> present(int id) {
    return id < 0 ? std::nullopt : std::optional<std::int64_t>(id);
  }

  sentencepiece::SentencePieceProcessor processor_;
};

}  // namespace

TokenizerPtr sentencepiece_tokenizer(const std::string& path) {
  return std::make_shared<SentencePieceTokenizer>(path);
}

}  // namespace tessera::data
