#include "unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>

#include "tessera/core/error.h"

namespace tessera::data {
namespace {

/// The size and the code point of the first character of `text`; a negative size if the character
/// is invalid.
utf8proc_ssize_t iterate(std::string_view text, utf8proc_int32_t& code) {
  return utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), std::ssize(text),
                          &code);
}

/// Whether further bytes can complete `text` to one character. If any continuation bytes complete
/// the character, the smallest or the largest continuation bytes do.
bool begins_character(std::string_view text) {
  return std::ranges::any_of(std::array{'\x80', '\xbf'}, [&](char continuation) {
    utf8proc_int32_t code = 0;
    const std::string completed = std::string(text) + std::string(3, continuation);
    return iterate(completed, code) > std::ssize(text);
  });
}

/// The number of valid UTF-8 bytes at the beginning of `text`.
std::size_t valid_prefix(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const Utf8Step step = first_character(text.substr(at));
    if (!step.valid) {
      break;
    }
    at += step.bytes;
  }
  return at;
}

}  // namespace

Utf8Step first_character(std::string_view text) {
  utf8proc_int32_t code = 0;
  if (const utf8proc_ssize_t size = iterate(text, code); size > 0) {
    return {.bytes = static_cast<std::size_t>(size), .valid = true};
  }
  for (std::size_t bytes = std::min<std::size_t>(3, text.size()); bytes > 0; --bytes) {
    if (begins_character(text.substr(0, bytes))) {
      return {.bytes = bytes, .cut = bytes == text.size()};
    }
  }
  return {.bytes = 1};
}

char32_t code_point(std::string_view character) {
  utf8proc_int32_t code = 0;
  iterate(character, code);
  return static_cast<char32_t>(code);
}

void append_character(char32_t code, std::string& text) {
  std::array<utf8proc_uint8_t, 4> bytes{};
  const auto size = utf8proc_encode_char(static_cast<utf8proc_int32_t>(code), bytes.data());
  text.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(size));
}

std::string_view last_character(std::string_view text) {
  std::size_t begin = text.size() - 1;
  while ((static_cast<unsigned char>(text[begin]) & 0xc0U) == 0x80U) {
    --begin;
  }
  return text.substr(begin);
}

std::string_view replace_invalid_utf8(std::string_view text, std::string& storage) {
  std::size_t valid = valid_prefix(text);
  if (valid == text.size()) {
    return text;
  }
  storage.clear();
  while (!text.empty()) {
    storage += text.substr(0, valid);
    text.remove_prefix(valid);
    if (!text.empty()) {
      storage += kReplacementCharacter;
      text.remove_prefix(first_character(text).bytes);
    }
    valid = valid_prefix(text);
  }
  return storage;
}

std::size_t incomplete_suffix(std::string_view text) {
  // An incomplete character has at most three bytes.
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, text.size()); ++back) {
    const Utf8Step step = first_character(text.substr(text.size() - back));
    if (step.cut && step.bytes == back) {
      return back;
    }
  }
  return 0;
}

std::string printable(std::string_view text) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7f) {
      out.push_back(c);
    } else {
      out += {'\\', 'x', kDigits[byte / 16], kDigits[byte % 16]};
    }
  }
  return out;
}

namespace {

bool is_space(char32_t code) {
  return (code >= 0x09 && code <= 0x0d) || code == 0x20 || code == 0x85 || code == 0xa0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 ||
         code == 0x202f || code == 0x205f || code == 0x3000;
}

}  // namespace

std::string normalized(std::string_view text, NormalizationForm form) {
  // ASCII text is returned unchanged, because it is equal in all normalization forms.
  if (std::ranges::none_of(text, [](char byte) { return (byte & 0x80) != 0; })) {
    return std::string(text);
  }
  const auto options = static_cast<utf8proc_option_t>(
      UTF8PROC_STABLE | (form.composed ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
      (form.compatible ? UTF8PROC_COMPAT : 0));
  utf8proc_uint8_t* bytes = nullptr;
  const utf8proc_ssize_t size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                             std::ssize(text), &bytes, options);
  const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owner(bytes, std::free);
  TESSERA_CHECK(size >= 0, "cannot normalize a text of ", text.size(),
                " bytes: ", utf8proc_errmsg(size));
  return {reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(size)};
}

std::string lower_case(std::string_view text) {
  constexpr char32_t kCapitalIWithDot = 0x130;  // the only character whose lower case consists of
                                                // two characters
  std::string out;
  for (std::size_t bytes = 0; !text.empty(); text.remove_prefix(bytes)) {
    bytes = first_character(text).bytes;
    const char32_t code = code_point(text.substr(0, bytes));
    if (code == kCapitalIWithDot) {
      out += "i\u0307";
    } else {
      append_character(static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(code))),
                       out);
    }
  }
  return out;
}

/// A word consists of letters, marks, decimal digits, letter numbers, connectors, joiners, and
/// circled letters.
bool is_word(char32_t code) {
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(code));
  static_assert(UTF8PROC_CATEGORY_LU == 1 && UTF8PROC_CATEGORY_NL == 10);
  return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_NL) ||
         category == UTF8PROC_CATEGORY_PC || code == 0x200c || code == 0x200d ||
         (code >= 0x24b6 && code <= 0x24e9) || (code >= 0x1f130 && code <= 0x1f149) ||
         (code >= 0x1f150 && code <= 0x1f169) || (code >= 0x1f170 && code <= 0x1f189);
}

std::size_t leading_space(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t bytes = first_character(text.substr(at)).bytes;
    if (!is_space(code_point(text.substr(at, bytes)))) {
      break;
    }
    at += bytes;
  }
  return at;
}

std::size_t without_trailing_space(std::string_view text) {
  while (!text.empty() && is_space(code_point(last_character(text)))) {
    text.remove_suffix(last_character(text).size());
  }
  return text.size();
}

}  // namespace tessera::data
