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
  /// Adds no begin or end token. Special tokens in the text are found. Invalid UTF-8 is read as
  /// U+FFFD, except by byte_tokenizer().
  virtual std::vector<std::int64_t> encode(std::string_view text) const = 0;
  /// Special tokens have no text. Where tokens are bytes the text may be invalid UTF-8. Throws
  /// Error for an id outside the vocabulary.
  virtual std::string decode(const std::vector<std::int64_t>& tokens) const = 0;
  /// The tokens that begin and end a text, in order; may be empty.
  virtual std::vector<std::int64_t> begin_tokens() const { return {}; }
  virtual std::vector<std::int64_t> end_tokens() const { return {}; }
  /// Whether a model's texts begin with begin_tokens(); nullopt if only the model's files say so.
  virtual std::optional<bool> begins_texts() const { return std::nullopt; }
};
/// Shared, because tokenizers do not change after they are made.
using TokenizerPtr = std::shared_ptr<const Tokenizer>;

/// One token per byte, 256 of them.
TokenizerPtr byte_tokenizer();
/// A SentencePiece model file. Throws Error if it cannot be read, or if Tessera was built without
/// the SentencePiece library.
TokenizerPtr sentencepiece_tokenizer(const std::string& path);
/// Hugging Face's tokenizer.json with a BPE model; the ids are those of the `tokenizers` package.
/// Throws Error if it cannot be read, and for steps that are not implemented (docs/data.md).
TokenizerPtr hugging_face_tokenizer(const std::string& path);
/// Models whose tokenizer.model has the form of the `tiktoken` package.
enum class TiktokenModel {
  kLlama3,  ///< 3 to 3.3
  kLlama4,
};
/// Meta's tokenizer.model of Llama 3 and 4. The file lacks the pattern and the special tokens,
/// which depend on `model`; without it the number of tokens tells the model. Throws Error if the
/// file cannot be read or is of another model.
TokenizerPtr tiktoken_tokenizer(const std::string& path,
                                std::optional<TiktokenModel> model = std::nullopt);

/// Opens a file of one of these three forms, recognized by its content. In a folder it takes
/// tokenizer.json, else tokenizer.model. tokenizer_config.json, special_tokens_map.json and
/// added_tokens.json in the folder are read as `transformers` reads them, except with tiktoken's
/// form. Throws their errors, and Error if these files contradict the tokenizer.
TokenizerPtr open_tokenizer(const std::string& path);
/// The file that open_tokenizer() takes in a folder.
std::optional<std::string> find_tokenizer(const std::string& folder);
/// All files that open_tokenizer() reads, the tokenizer first. Throws its errors.
std::vector<std::string> tokenizer_files(const std::string& path);
/// Whether a file has the form of a tokenizer.json. Throws Error if it cannot be read.
bool is_tokenizer_json(const std::string& path);

/// Decodes tokens one at a time. The pieces together are the text of all tokens; no piece ends
/// within a character. The time for a token does not depend on earlier tokens. Not thread safe.
class StreamDecoder {
 public:
  /// `before`: tokens whose text is not returned.
  explicit StreamDecoder(TokenizerPtr tokenizer, const std::vector<std::int64_t>& before = {});

  /// The text that this token completes; may be empty. Bytes that cannot become a character are
  /// returned unchanged. An id beyond the vocabulary has no text, as in transformers, since a
  /// model's vocabulary may be padded. Throws Error for a negative id.
  std::string push(std::int64_t token);
  /// The rest of the text, which may be invalid UTF-8.
  std::string finish();

 private:
  bool has_own_text(std::int64_t token) const;
  bool has_text(std::int64_t token) const;
  void shorten_window();
  /// The new text of the window, without the last `unfinished` bytes.
  std::string take_new(std::size_t unfinished, std::string_view text);

  TokenizerPtr tokenizer_;
  std::vector<std::int64_t> window_;  ///< the last tokens that have text
  std::size_t given_ = 0;             ///< bytes of the window's text that were returned
};

}  // namespace tessera::data
TESSERA_API_END
