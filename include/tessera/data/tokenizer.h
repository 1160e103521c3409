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

/// Converts text to token ids and back. Immutable, so threads may share it.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  /// Token ids are in [0, vocabulary()).
  virtual std::int64_t vocabulary() const = 0;
  /// Adds no begin or end token. Special tokens written in the text are recognized. Invalid UTF-8
  /// is read as U+FFFD, except by byte_tokenizer().
  virtual std::vector<std::int64_t> encode(std::string_view text) const = 0;
  /// Special tokens decode to nothing. If tokens are bytes, the text may be invalid UTF-8. Throws
  /// Error for an id outside the vocabulary.
  virtual std::string decode(const std::vector<std::int64_t>& tokens) const = 0;
  /// The tokens that begin and end a text, in order; may be empty.
  virtual std::vector<std::int64_t> begin_tokens() const { return {}; }
  virtual std::vector<std::int64_t> end_tokens() const { return {}; }
  /// Whether texts for the model begin with begin_tokens(); nullopt if the tokenizer's files do not
  /// say so.
  virtual std::optional<bool> begins_texts() const { return std::nullopt; }
};
/// A shared pointer: tokenizers are immutable and may be shared.
using TokenizerPtr = std::shared_ptr<const Tokenizer>;

/// The tokenizer with one token per byte: a vocabulary of 256.
TokenizerPtr byte_tokenizer();
/// Opens a SentencePiece model file. Throws Error if the file cannot be read, or if Tessera was
/// built without the SentencePiece library.
TokenizerPtr sentencepiece_tokenizer(const std::string& path);
/// Opens Hugging Face's tokenizer.json with a BPE model. Token ids equal those of the `tokenizers`
/// package. Throws Error if the file cannot be read, and for processing steps that are not
/// implemented (docs/data.md).
TokenizerPtr hugging_face_tokenizer(const std::string& path);
/// The models whose tokenizer.model has the format of the `tiktoken` package.
enum class TiktokenModel {
  kLlama3,  ///< the format of Llama 3 to 3.3
  kLlama4,
};
/// Opens Meta's tokenizer.model of Llama 3 or 4. The file lacks the splitting pattern and the
/// special tokens, which depend on `model`. Without `model`, the number of tokens determines it.
/// Throws Error if the file cannot be read or belongs to another model.
TokenizerPtr tiktoken_tokenizer(const std::string& path,
                                std::optional<TiktokenModel> model = std::nullopt);

/// Opens a SentencePiece, tokenizer.json or tiktoken file, recognized by its content. In a folder
/// it opens tokenizer.json, else tokenizer.model. For the first two formats, tokenizer_config.json,
/// special_tokens_map.json and added_tokens.json in the folder are read as `transformers` reads
/// them. Throws the errors of these formats, and Error if the folder's files contradict the
/// tokenizer.
TokenizerPtr open_tokenizer(const std::string& path);
/// Returns the file that open_tokenizer() opens in a folder.
std::optional<std::string> find_tokenizer(const std::string& folder);
/// Returns all files that open_tokenizer() reads, the tokenizer's file first. Throws the errors of
/// open_tokenizer().
std::vector<std::string> tokenizer_files(const std::string& path);
/// Whether a file has the format of a tokenizer.json. Throws Error if the file cannot be read.
bool is_tokenizer_json(const std::string& path);

/// Decodes tokens one at a time. The concatenated pieces equal the text of all tokens, and no piece
/// ends inside a character. The time per token does not depend on the number of earlier tokens. Not
/// thread safe.
class StreamDecoder {
 public:
  /// `before`: preceding tokens, which are context only; their text is not returned.
  explicit StreamDecoder(TokenizerPtr tokenizer, const std::vector<std::int64_t>& before = {});

  /// Returns the text that this token completes; may be empty. Bytes that cannot become a character
  /// are returned unchanged. An id above the vocabulary decodes to nothing, as in `transformers`,
  /// because a model's vocabulary may be padded. Throws Error for a negative id.
  std::string push(std::int64_t token);
  /// Returns the remaining text, which may be invalid UTF-8.
  std::string finish();

 private:
  bool has_own_text(std::int64_t token) const;
  bool has_text(std::int64_t token) const;
  void shorten_window();
  /// Returns the window's new text without its last `unfinished` bytes.
  std::string take_new(std::size_t unfinished, std::string_view text);

  TokenizerPtr tokenizer_;
  std::vector<std::int64_t> window_;  ///< the last decoded tokens that have text
  std::size_t given_ = 0;             ///< bytes of the window's text that were already returned
};

}  // namespace tessera::data
TESSERA_API_END
