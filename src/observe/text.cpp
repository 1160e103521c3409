// fmt is used without a locale: output is the same on every machine.
#include "tessera/observe/text.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace tessera::observe {
namespace {

/// U+FFFD in UTF-8.
constexpr std::string_view kReplacement = "\xef\xbf\xbd";

/// The second and later bytes of a sequence: 10xxxxxx.
bool is_continuation(unsigned char byte) {
  return byte >= 0x80 && byte < 0xc0;
}

/// Length of the UTF-8 sequence that `text` begins with, or 0 if it is not one (Unicode, table 3-7:
/// no overlong forms, no surrogates, nothing above U+10FFFF).
std::size_t sequence_length(std::string_view text) {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = at(0);
  if (first < 0x80) {
    return 1;
  }
  const std::size_t length = first < 0xc2   ? 0
                             : first < 0xe0 ? 2
                             : first < 0xf0 ? 3
                             : first < 0xf5 ? 4
                                            : 0;
  if (length == 0 || text.size() < length) {
    return 0;
  }
  for (std::size_t i = 1; i < length; ++i) {
    if (!is_continuation(at(i))) {
      return 0;
    }
  }
  // After these first bytes only some second bytes are allowed.
  const bool excluded = (first == 0xe0 && at(1) < 0xa0) || (first == 0xed && at(1) >= 0xa0) ||
                        (first == 0xf0 && at(1) < 0x90) || (first == 0xf4 && at(1) >= 0x90);
  return excluded ? 0 : length;
}

/// Empty for what needs no escape. Quotes as well, for attributes.
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

/// HTML forbids them, escaped or not.
bool is_control(unsigned char c) {
  return (c < 0x20 && c != '\t' && c != '\n') || c == 0x7f;
}

}  // namespace

/// A model's sample may hold any bytes: a byte-level tokenizer cuts characters in half. Then one
/// U+FFFD stands for each bad byte.
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

/// Grouped from the decimal point to the left.
std::string grouped(double value, int decimals) {
  std::string text = fmt::format("{:.{}f}", value, decimals);
  // "inf" has no groups.
  if (!std::isfinite(value)) {
    return text;
  }
  // Behind the sign.
  const std::size_t first = text.starts_with('-') ? 1 : 0;
  std::size_t position = text.find('.');
  if (position == std::string::npos) {
    position = text.size();
  }
  while (position > first + 3) {
    position -= 3;
    text.insert(position, 1, ',');
  }
  return text;
}

/// About three significant digits; bytes are whole.
std::string bytes_text(double bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; std::fabs(bytes) >= 1024 && unit + 1 < kUnits.size(); ++unit) {
    bytes /= 1024;
  }
  const int decimals = unit == 0 || bytes >= 100 ? 0 : bytes >= 10 ? 1 : 2;
  return fmt::format("{:.{}f} {}", bytes, decimals, kUnits[unit]);
}

std::string compact(double value) {
  for (const auto& [limit, suffix] :
       {std::pair(1e9, "G"), std::pair(1e6, "M"), std::pair(1e4, "k")}) {
    // Thousands are abbreviated from 10k on: "1234" says more than "1.234k".
    const double scale = limit == 1e4 ? 1e3 : limit;
    if (std::fabs(value) >= limit) {
      return fmt::format("{:.4g}{}", value / scale, suffix);
    }
  }
  return fmt::format("{:.4g}", value);
}

/// Two units at most.
std::string duration_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::llround(seconds));
  if (whole < 60) {
    return fmt::format("{}s", whole);
  }
  if (whole < 3600) {
    return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  }
  if (whole < 86400) {
    return fmt::format("{}h{:02}m", whole / 3600, whole / 60 % 60);
  }
  return fmt::format("{}d{:02}h", whole / 86400, whole / 3600 % 24);
}

}  // namespace tessera::observe
