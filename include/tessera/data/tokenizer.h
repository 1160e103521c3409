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

/// Text to token ids and back. Immutable, so threads may share it.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  /// Ids are [0, vocabulary()).
  virtual std::int64_t vocabulary() const = 0;
  /// Adds no begin or end token. Special tokens that are written out in the text are found. Bytes
  /// that are not UTF-8 are read as U+FFFD, except by byte_tokenizer().
  virtual std::vector<std::int64_t> encode(std::string_view text) const = 0;
  /// The text; special tokens have none. Perhaps not valid UTF-8, where tokens are bytes. Throws
  /// Error for an id outside the vocabulary.
  virtual std::string decode(const std::vector<std::int64_t>& tokens) const = 0;
  /// The tokens that begin and end a text, in their order; none where the tokenizer has none.
  virtual std::vector<std::int64_t> begin_tokens() const { return {}; }
  virtual std::vector<std::int64_t> end_tokens() const { return {}; }
  /// Whether a text that a model reads begins with begin_tokens(), where the tokenizer's files say:
  /// nullopt leaves it to the model's.
  virtual std::optional<bool> begins_texts() const { return std::nullopt; }
};
/// Shared by all that encode or decode with it.
using TokenizerPtr = std::shared_ptr<const Tokenizer>;

/// One token per byte, 256 of them.
TokenizerPtr byte_tokenizer();
/// A SentencePiece model file. Throws Error if it can't be read, or if Tessera was built without
/// the SentencePiece library.
TokenizerPtr sentencepiece_tokenizer(const std::string& path);
/// Hugging Face's tokenizer.json with a model of byte-pair encoding; the ids are those of the
/// `tokenizers` package. Throws Error if it can't be read, and for what is not implemented, which
/// docs/data.md lists.
TokenizerPtr hugging_face_tokenizer(const std::string& path);
/// Models whose tokenizer.model has the form of the `tiktoken` package.
enum class TiktokenModel {
  kLlama3,  ///< 3 to 3.3
  kLlama4,
};
/// Meta's tokenizer.model of Llama 3 and 4. It has neither the pattern that splits a text nor the
/// special tokens: these are `model`'s, or, if it is not given, those of the model with that many
/// tokens. Throws Error if the file can't be read, or if its tokens are not that model's.
TokenizerPtr tiktoken_tokenizer(const std::string& path,
                                std::optional<TiktokenModel> model = std::nullopt);

/// A tokenizer of one of these three forms, told by the file's content; of a folder its
/// tokenizer.json or else its tokenizer.model. For the first and the last, the files beside it
/// are read as `transformers` does: tokenizer_config.json, special_tokens_map.json and
/// added_tokens.json. Throws Error as they do, and where these contradict the tokenizer.
TokenizerPtr open_tokenizer(const std::string& path);
/// The file that open_tokenizer() takes of a folder.
std::optional<std::string> find_tokenizer(const std::string& folder);
/// All files that decide on the ids of open_tokenizer(): the tokenizer's own, then those that are
/// read beside it. Throws Error as it does for these.
std::vector<std::string> tokenizer_files(const std::string& path);
/// Whether open_tokenizer() reads a file as a tokenizer.json. Throws Error if it can't be read.
bool is_tokenizer_json(const std::string& path);

/// Decodes tokens as they come: the pieces joined are the text of all tokens, and none ends within
/// a character. A token costs the same however many came before. Not thread safe.
class StreamDecoder {
 public:
  /// `before`: tokens whose text has been shown already.
  explicit StreamDecoder(TokenizerPtr tokenizer, const std::vector<std::int64_t>& before = {});

  /// The text that this token completes; often empty for a part of a character. Bytes that can no
  /// longer become a character are returned unchanged. An id beyond the vocabulary has no text, as
  /// in transformers: a model's vocabulary may be padded. Throws Error for a negative one.
  std::string push(std::int64_t token);
  /// What is left when no token follows; perhaps not valid UTF-8.
  std::string finish();

 private:
  bool has_own_text(std::int64_t token) const;
  bool has_text(std::int64_t token) const;
  void shorten_window();
  /// What of the window's text has not been given, without so many bytes at its end.
  std::string give_all_but(std::size_t held, std::string_view text);

  TokenizerPtr tokenizer_;
  std::vector<std::int64_t> window_;  ///< the last tokens that have text
  std::size_t given_ = 0;             ///< bytes of the window's text that have been given
};

}  // namespace tessera::data
TESSERA_API_END
