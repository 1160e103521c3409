#include "html.h"

#include <cstddef>

namespace tessera::observe {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

bool is_continuation(unsigned char byte) {
  return byte >= 0x80 && byte < 0xc0;
}

/// Length of the UTF-8 sequence that `text` begins with, or 0 if it is not one (Unicode, table 3-7:
/// no overlong forms, no surrogates, nothing above U+10FFFF).
std::size_t sequence_length(std::string_view text) {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = at(0);
  if (first < 0x80) return 1;
  const std::size_t length = first < 0xc2   ? 0
                             : first < 0xe0 ? 2
                             : first < 0xf0 ? 3
                             : first < 0xf5 ? 4
                                            : 0;
  if (length == 0 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if (!is_continuation(at(i))) return 0;
  }
  const bool excluded = (first == 0xe0 && at(1) < 0xa0) || (first == 0xed && at(1) >= 0xa0) ||
                        (first == 0xf0 && at(1) < 0x90) || (first == 0xf4 && at(1) >= 0x90);
  return excluded ? 0 : length;
}

std::string_view escaped(char c) {
  switch (c) {
    case '&':
      return "&amp;";
    case '<':
      return "&lt;";
    case '>':
      return "&gt;";
    case '"':
      return "&quot;";
    case '\'':
      return "&#39;";
    default:
      return {};
  }
}

bool is_control(unsigned char c) {
  return (c < 0x20 && c != '\t' && c != '\n') || c == 0x7f;
}

}  // namespace

std::string escape_html(std::string_view text) {
  std::string html;
  html.reserve(text.size());
  while (!text.empty()) {
    const std::size_t length = sequence_length(text);
    if (length == 0 || is_control(static_cast<unsigned char>(text[0]))) {
      html += kReplacement;
    } else if (const auto entity = escaped(text[0]); !entity.empty()) {
      html += entity;
    } else {
      html += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return html;
}

}  // namespace tessera::observe
