#include "unicode/properties.h"

#include <array>
#include <map>
#include <unordered_map>

#include "tessera/core/error.h"
#include "unicode/tables.h"
#include "unicode/utf8.h"

namespace tessera::data {
namespace {

/// By CodeKind, as tables.inc names them.
constexpr std::array<std::string_view, 11> kKinds{
    "\\w",         "\\W",        "[\\w]",    "[\\W]", "\\s", "\\d", "\\h", "step punctuation",
    "step digits", "step space", "step word"};

bool has_name(std::string_view names, std::string_view name) {
  while (!names.empty()) {
    const std::size_t end = std::min(names.find('|'), names.size());
    if (names.substr(0, end) == name) {
      return true;
    }
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return false;
}

CodeSet codes_of(const PropertyEntry& entry) {
  CodeSet codes;
  char32_t next = 0;
  for (std::uint32_t i = 0; i < entry.count; ++i) {
    const char32_t first = next + kUnicode.ranges[entry.begin + 2 * i];
    next = first + kUnicode.ranges[entry.begin + 2 * i + 1];
    codes.add(first, next - 1);
  }
  return codes;
}

/// Each with all of its cases.
std::unordered_map<char32_t, std::span<const std::uint32_t>> read_folds() {
  std::unordered_map<char32_t, std::span<const std::uint32_t>> folds;
  for (std::size_t i = 0; i < kUnicode.folds.size(); i += kUnicode.folds[i] + 1) {
    const auto orbit = kUnicode.folds.subspan(i + 1, kUnicode.folds[i]);
    for (const std::uint32_t code : orbit) {
      folds.emplace(code, orbit);
    }
  }
  return folds;
}

std::vector<std::u32string> read_long_folds() {
  std::vector<std::u32string> texts;
  const auto& all = kUnicode.multiple_folds;
  for (std::size_t i = 0; i < all.size(); i += all[i] + 1) {
    const auto text = all.subspan(i + 1, all[i]);
    texts.emplace_back(text.begin(), text.end());
  }
  return texts;
}

std::unordered_map<char32_t, std::string> read_lower() {
  std::unordered_map<char32_t, std::string> lower;
  char32_t code = 0;
  for (std::size_t i = 0; i < kUnicode.lower.size(); i += 2 + kUnicode.lower[i + 1]) {
    code += kUnicode.lower[i];
    for (const std::uint32_t part : kUnicode.lower.subspan(i + 2, kUnicode.lower[i + 1])) {
      append_character(part, lower[code]);
    }
  }
  return lower;
}

}  // namespace

std::optional<CodeSet> unicode_property(std::string_view name) {
  for (const PropertyEntry& entry : kUnicode.properties) {
    if (has_name(entry.names, name)) {
      return codes_of(entry);
    }
  }
  return std::nullopt;
}

const CodeSet& unicode_codes(CodeKind kind) {
  static const auto all = [] {
    std::array<CodeSet, kKinds.size()> sets;
    for (std::size_t i = 0; i < sets.size(); ++i) {
      sets[i] = unicode_property(kKinds[i]).value();
    }
    return sets;
  }();
  return all.at(static_cast<std::size_t>(kind));
}

CodeSet with_other_cases(const CodeSet& codes) {
  static const auto folds = read_folds();
  CodeSet all = codes;
  for (const auto& [code, orbit] : folds) {
    if (codes.contains(code)) {
      for (const std::uint32_t other : orbit) {
        all.add(other, other);
      }
    }
  }
  return all;
}

const std::vector<std::u32string>& long_case_folds() {
  static const auto texts = read_long_folds();
  return texts;
}

void append_lower(char32_t code, std::string& text) {
  static const auto lower = read_lower();
  const auto found = lower.find(code);
  found == lower.end() ? append_character(code, text) : void(text += found->second);
}

}  // namespace tessera::data
