#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

/// Text to token ids and back. Immutable, so threads may share it.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  /// Ids are [0, vocabulary()).
  virtual std::int64_t vocabulary() const = 0;
  /// Adds no begin or end token.
  virtual std::vector<std::int64_t> encode(std::string_view text) const = 0;
  /// The text; with a byte-level tokenizer perhaps not valid UTF-8. Throws Error for an id outside
  /// the vocabulary.
  virtual std::string decode(const std::vector<std::int64_t>& tokens) const = 0;
  /// The tokens that begin and end a text, where the tokenizer has them.
  virtual std::optional<std::int64_t> begin_token() const { return std::nullopt; }
  virtual std::optional<std::int64_t> end_token() const { return std::nullopt; }
};
using TokenizerPtr = std::shared_ptr<const Tokenizer>;

/// One token per byte, 256 of them.
TokenizerPtr byte_tokenizer();
/// A SentencePiece model file. Throws Error if it can't be read, or if Tessera was built without
/// the SentencePiece library.
TokenizerPtr sentencepiece_tokenizer(const std::string& path);

}  // namespace tessera::data
