#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// Converts text to token ids and back. Immutable: several threads may use one tokenizer.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  /// Returns the size of the vocabulary. Token ids are in [0, vocabulary()).
  virtual std::int64_t vocabulary() const = 0;
  /// Returns the tokens of a text, without begin and end tokens. Recognizes special tokens in the
  /// text. Invalid UTF-8 is read as U+FFFD, except by byte_tokenizer().
  virtual std::vector<std::int64_t> encode(std::string_view text) const = 0;
  /// Returns the text of tokens. Special tokens have no text. If tokens are bytes, the text can be
  /// invalid UTF-8. Throws Error for an id outside the vocabulary.
  virtual std::string decode(const std::vector<std::int64_t>& tokens) const = 0;
  /// begin_tokens() and end_tokens() return the tokens to add before and after a text, if any.
  virtual std::vector<std::int64_t> begin_tokens() const { return {}; }
  virtual std::vector<std::int64_t> end_tokens() const { return {}; }
  /// Whether texts for the model begin with begin_tokens(); nullopt if no tokenizer file says so.
  virtual std::optional<bool> begins_texts() const { return std::nullopt; }
};
/// A shared pointer to a tokenizer.
using TokenizerPtr = std::shared_ptr<const Tokenizer>;

/// Opens a SentencePiece, tokenizer.json or tiktoken file, detected by content. In a folder, opens
/// tokenizer.json or, if missing, tokenizer.model. Also reads the folder's files of special tokens,
/// as `transformers` does. Throws Error if a file is unreadable or has a wrong format, or if files
/// contradict each other.
TokenizerPtr open_tokenizer(const std::string& path);
/// Returns all files that open_tokenizer() reads, the tokenizer's file first. Throws the errors of
/// open_tokenizer().
std::vector<std::string> tokenizer_files(const std::string& path);
/// Whether a file has the format of a tokenizer.json. Throws Error if the file cannot be read.
bool is_tokenizer_json(const std::string& path);

/// Decodes tokens one at a time. The texts of push() and finish(), concatenated, are the text of
/// all tokens. No text of push() ends inside a character. Not thread safe.
class StreamDecoder {
 public:
  /// `before`: the tokens that precede the first push(). push() does not return their texts.
  explicit StreamDecoder(TokenizerPtr tokenizer, const std::vector<std::int64_t>& before = {});

  /// Returns the new characters that `token` completes, if any. Invalid UTF-8 is returned
  /// unchanged, before the next valid character. An id above the vocabulary decodes to nothing.
  /// Throws Error for a negative id.
  std::string push(std::int64_t token);
  /// Returns the text that push() has not returned yet. This text can be invalid UTF-8.
  std::string finish();

 private:
  /// Returns the part of `text` that push() has not returned yet, and removes old tokens from
  /// window_.
  std::string take_new(const std::string& text);

  TokenizerPtr tokenizer_;
  /// Tokens kept for decoding: those whose text was returned last, then those not yet returned.
  std::vector<std::int64_t> window_;
  std::size_t context_ = 0;  ///< number of tokens in window_ whose text was returned
  std::size_t given_ = 0;    ///< bytes of the text of window_ that were returned
};

}  // namespace tessera::data
TESSERA_API_END
