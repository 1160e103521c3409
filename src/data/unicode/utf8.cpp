#include "unicode/utf8.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace tessera::data {
namespace {

/// What may follow a first byte: how many bytes in all, and the range of the second, which excludes
/// overlong forms, surrogates and what is beyond U+10FFFF.
struct Lead {
  std::size_t bytes = 0;  ///< 0: no character begins so
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

/// Bytes of the valid text at the beginning.
std::size_t valid_prefix(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    // Eight ASCII characters at once.
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
  const auto first = static_cast<unsigned char>(character[0]);
  if (character.size() == 1) {
    return first;
  }
  // 5, 4 or 3 bits of the first byte, 6 of each other.
  char32_t code = first & (0x7fU >> character.size());
  for (const char byte : character.substr(1)) {
    code = code << 6 | (static_cast<unsigned char>(byte) & 0x3fU);
  }
  return code;
}

void append_character(char32_t code, std::string& text) {
  const auto byte = [](char32_t bits) { return static_cast<char>(bits); };
  const auto behind = [&](int shift) { return byte(0x80U | (code >> shift & 0x3fU)); };
  if (code < 0x80) {
    text += byte(code);
  } else if (code < 0x800) {
    text += {byte(0xc0U | code >> 6), behind(0)};
  } else if (code < 0x10000) {
    text += {byte(0xe0U | code >> 12), behind(6), behind(0)};
  } else {
    text += {byte(0xf0U | code >> 18), behind(12), behind(6), behind(0)};
  }
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
  // The longest character has four bytes.
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

}  // namespace tessera::data
