#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/data/tokenizer.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

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
