#include "unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

namespace tessera::data {
namespace {

/// The size of a character according to its first byte, and the range of its second byte, which
/// excludes overlong forms, surrogates and code points above U+10FFFF.
struct Lead {
  std::size_t bytes = 0;  ///< bytes of the character; 0: not a first byte
  unsigned char low = 0x80;
  unsigned char high = 0xbf;
};

constexpr Lead lead_of(unsigned char byte) {
  if (byte < 0x80) {
    return {1};
  }
  if (byte < 0xc2 || byte > 0xf4) {
    return {0};
  }
  if (byte < 0xe0) {
    return {2};
  }
  if (byte < 0xf0) {
    return {3, static_cast<unsigned char>(byte == 0xe0 ? 0xa0 : 0x80),
            static_cast<unsigned char>(byte == 0xed ? 0x9f : 0xbf)};
  }
  return {4, static_cast<unsigned char>(byte == 0xf0 ? 0x90 : 0x80),
          static_cast<unsigned char>(byte == 0xf4 ? 0x8f : 0xbf)};
}

/// The number of valid bytes at the beginning.
std::size_t valid_prefix(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    // Tests eight ASCII characters at once.
    std::uint64_t eight = 0;
    if (text.size() - at >= sizeof(eight)) {
      std::memcpy(&eight, text.data() + at, sizeof(eight));
      if ((eight & 0x8080808080808080U) == 0) {
        at += sizeof(eight);
        continue;
      }
    }
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
  const Lead lead = lead_of(static_cast<unsigned char>(text[0]));
  for (std::size_t i = 1; i < lead.bytes; ++i) {
    if (i == text.size()) {
      return {.bytes = i, .valid = false, .cut = true};
    }
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < (i == 1 ? lead.low : 0x80) || byte > (i == 1 ? lead.high : 0xbf)) {
      return {.bytes = i, .valid = false, .cut = false};
    }
  }
  return {.bytes = std::max<std::size_t>(lead.bytes, 1), .valid = lead.bytes > 0, .cut = false};
}

char32_t code_point(std::string_view character) {
  utf8proc_int32_t code = 0;
  utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(character.data()),
                   std::ssize(character), &code);
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

using Codes = std::vector<utf8proc_int32_t>;

utf8proc_propval_t combining_class(utf8proc_int32_t code) {
  return utf8proc_get_property(code)->combining_class;
}

/// Sorts runs of combining marks. utf8proc sorts marks in quadratic time, so each character is
/// decomposed separately and the runs are sorted here.
void order_marks(Codes& codes) {
  const auto is_mark = [](utf8proc_int32_t code) { return combining_class(code) != 0; };
  for (auto end = codes.begin(); end != codes.end();) {
    const auto begin = std::find_if(end, codes.end(), is_mark);
    end = std::find_if_not(begin, codes.end(), is_mark);
    if (end - begin > 1) {
      std::stable_sort(begin, end,
                       [](auto a, auto b) { return combining_class(a) < combining_class(b); });
    }
  }
}

bool is_space(char32_t code) {
  return (code >= 0x09 && code <= 0x0d) || code == 0x20 || code == 0x85 || code == 0xa0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 ||
         code == 0x202f || code == 0x205f || code == 0x3000;
}

void append_normalized(std::string_view text, NormalizationForm form, std::string& out) {
  // A character has at most 18 code points in any normalization form.
  constexpr std::size_t kMostCodes = 32;
  const auto decompose =
      static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | (form.compatible ? UTF8PROC_COMPAT : 0));
  Codes codes;
  for (std::size_t bytes = 0; !text.empty(); text.remove_prefix(bytes)) {
    bytes = first_character(text).bytes;
    const std::size_t size = codes.size();
    codes.resize(size + kMostCodes);
    int boundary = 0;
    const auto count =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(code_point(text.substr(0, bytes))),
                                codes.data() + size, kMostCodes, decompose, &boundary);
    codes.resize(size + static_cast<std::size_t>(count));
  }
  order_marks(codes);
  if (form.composed) {
    codes.resize(static_cast<std::size_t>(utf8proc_normalize_utf32(
        codes.data(), std::ssize(codes),
        static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE))));
  }
  for (const utf8proc_int32_t code : codes) {
    append_character(static_cast<char32_t>(code), out);
  }
}

bool is_ascii(char byte) {
  return static_cast<unsigned char>(byte) < 0x80;
}

}  // namespace

/// ASCII is not changed, except that its last character may be composed with the marks after it.
std::string normalized(std::string_view text, NormalizationForm form) {
  std::string out;
  while (!text.empty()) {
    const auto ascii =
        static_cast<std::size_t>(std::ranges::find_if_not(text, is_ascii) - text.begin());
    const std::size_t plain = ascii == text.size() || ascii == 0 ? ascii : ascii - 1;
    out += text.substr(0, plain);
    text.remove_prefix(plain);
    const auto* const begin = text.begin() + (text.empty() ? 0 : 1);
    const auto others =
        static_cast<std::size_t>(std::find_if(begin, text.end(), is_ascii) - text.begin());
    append_normalized(text.substr(0, others), form, out);
    text.remove_prefix(others);
  }
  return out;
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

/// Letters, marks, decimal digits, letter numbers, connectors, joiners, and circled letters.
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
