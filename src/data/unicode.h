// For tokenizers: UTF-8, Unicode functions (from utf8proc) and regular expressions (from PCRE2).

#pragma once

#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

struct pcre2_real_code_8;

namespace tessera::data {

inline constexpr std::string_view kReplacementCharacter = "\xef\xbf\xbd";  // U+FFFD in UTF-8

/// The result of first_character(): the first character of a text, or invalid bytes.
struct Utf8Step {
  std::size_t bytes = 0;
  bool valid = false;
  bool cut = false;  ///< whether the text ends inside this character
};

/// Returns the first character of a non-empty text. Invalid bytes are grouped into sequences as the
/// Unicode standard recommends (section 3.9, maximal subparts), as in Python and Rust.
Utf8Step first_character(std::string_view text);
/// Returns the last character of a non-empty text in valid UTF-8.
std::string_view last_character(std::string_view text);
/// Returns the code point of a character in valid UTF-8.
char32_t code_point(std::string_view character);

/// Returns `text` if it is valid UTF-8. Otherwise returns a copy, stored in `storage`, with U+FFFD
/// for each invalid byte sequence.
std::string_view replace_invalid_utf8(std::string_view text, std::string& storage);
/// Returns the number of bytes at the end of `text` that belong to an incomplete character.
std::size_t incomplete_suffix(std::string_view text);
/// Replaces control characters by \xNN, so that a message remains on one line.
std::string printable(std::string_view text);

/// Returns `text`, valid UTF-8, in the Unicode normalization form NFC (UAX #15).
std::string to_nfc(std::string_view text);

/// A regular expression of a tokenizer, in Oniguruma's syntax; PCRE2 runs the search. Tokenizer
/// files can be untrusted, so the steps and the memory of a search are limited. Immutable.
class Pattern {
 public:
  /// Throws Error for an invalid or unsupported regular expression.
  explicit Pattern(std::string_view expression);

  using OnMatch = c10::function_ref<void(std::size_t begin, std::size_t end)>;
  /// Calls the visitor for each match in a text of valid UTF-8, from left to right. Empty matches
  /// are included. Throws Error if the search exceeds a limit.
  void for_each_match(std::string_view text, OnMatch on_match) const;

 private:
  struct Free {
    void operator()(pcre2_real_code_8* code) const;
  };

  std::string expression_;
  std::unique_ptr<pcre2_real_code_8, Free> code_;
};

}  // namespace tessera::data
