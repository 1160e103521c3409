#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera::data {

inline constexpr std::string_view kReplacementCharacter = "\xef\xbf\xbd";  // U+FFFD

/// What a text begins with: a character, or bytes that are none.
struct Utf8Step {
  std::size_t bytes = 0;
  bool valid = false;
  bool cut = false;  ///< not valid, but the text ends where the character could still be completed
};

/// `text`: not empty. Invalid bytes are grouped as the Unicode standard recommends (section 3.9,
/// maximal subparts), as Python and Rust do.
Utf8Step first_character(std::string_view text);

/// For a message: control characters as \xNN, so that it stays one line.
std::string printable(std::string_view text);

/// The code point of a valid character.
char32_t code_point(std::string_view character);

/// Appends a code point that is no surrogate.
void append_character(char32_t code, std::string& text);

/// The last character of valid UTF-8 that is not empty.
std::string_view last_character(std::string_view text);

/// `text` itself if it is UTF-8; else a copy in `storage` with U+FFFD in place of what is not.
std::string_view replace_invalid_utf8(std::string_view text, std::string& storage);

/// How many bytes at the end of `text` begin a character that is not complete.
std::size_t incomplete_suffix(std::string_view text);

}  // namespace tessera::data
