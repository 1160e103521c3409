#include "tessera/data/tokenizer.h"

#include <cstdint>
#include <string>

#include "tessera/core/error.h"

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

}  // namespace tessera::data
