// The tokenizers: bytes, and SentencePiece models where the library was found
// (TESSERA_SENTENCEPIECE, set in CMakeLists.txt for this file alone). Without it the same function
// says what to install.
#include "tessera/data/tokenizer.h"

#ifdef TESSERA_SENTENCEPIECE
#include <sentencepiece_processor.h>
#endif

#include <cstdint>
#include <exception>
#include <string>

#include "tessera/core/detail/input_file.h"
#include "tessera/core/error.h"
#include "tokenizer/utf8.h"

namespace tessera::data {
namespace {

/// Needs no file and loses nothing: for tests and small examples.
class ByteTokenizer final : public Tokenizer {
 public:
  std::int64_t vocabulary() const override { return 256; }

  std::vector<std::int64_t> encode(std::string_view text) const override {
    // Unsigned, as ids begin at 0.
    const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
    return {bytes, bytes + text.size()};
  }

  std::string decode(const std::vector<std::int64_t>& tokens) const override {
    std::string text;
    text.reserve(tokens.size());
    for (const auto token : tokens) {
      TESSERA_CHECK(token >= 0 && token < vocabulary(), "token ", token,
                    " is not a byte: decode with the tokenizer that made it");
      text.push_back(static_cast<char>(token));
    }
    return text;
  }
};

}  // namespace

TokenizerPtr byte_tokenizer() {
  return std::make_shared<ByteTokenizer>();
}

#ifdef TESSERA_SENTENCEPIECE
namespace {

/// Ten times the largest that are known.
constexpr std::uint64_t kMaxModelBytes = 100'000'000;

/// The library's calls that it uses are const and safe for several threads.
class SentencePieceTokenizer final : public Tokenizer {
 public:
  explicit SentencePieceTokenizer(const std::string& path) {
    const std::string fault =
        load(detail::read_file(path, "a SentencePiece model (tokenizer.model)", kMaxModelBytes));
    TESSERA_CHECK(fault.empty(), "'", path, "' is not a SentencePiece model (", fault,
                  "): give a tokenizer.model");
  }

  std::int64_t vocabulary() const override { return processor_.GetPieceSize(); }

  std::vector<std::int64_t> encode(std::string_view text) const override {
    // The library itself would make one U+FFFD of each byte.
    std::string valid;
    std::vector<int> ids;
    const auto status = processor_.Encode(replace_invalid_utf8(text, valid), &ids);
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
  /// What the library says against a model: by its status or, of some faults, by an exception.
  std::string load(const std::string& model) {
    try {
      const auto status = processor_.LoadFromSerializedProto(model);
      return status.ok() ? "" : status.ToString();
    } catch (const std::exception& error) {
      return error.what();
    }
  }

  // -1 says that a model has no such token.
  static std::optional<std::int64_t> present(int id) {
    return id < 0 ? std::nullopt : std::optional<std::int64_t>(id);
  }

  sentencepiece::SentencePieceProcessor processor_;
};

}  // namespace

TokenizerPtr sentencepiece_tokenizer(const std::string& path) {
  return std::make_shared<SentencePieceTokenizer>(path);
}

#else
TokenizerPtr sentencepiece_tokenizer(const std::string& path) {
  fail("cannot read the tokenizer '", path,
       "': Tessera was built without SentencePiece: install libsentencepiece-dev and build again");
}
#endif

}  // namespace tessera::data
