#include "unicode/properties.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <numeric>
#include <span>
#include <unordered_map>
#include <utility>

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

using Codes = std::vector<char32_t>;

/// The edges of each entry's own ranges, without its bases.
std::vector<Codes> read_edges() {
  std::vector<Codes> all;
  std::size_t begin = 0;
  for (const PropertyEntry& entry : kUnicode.properties) {
    const auto distances = kUnicode.edges.subspan(begin, entry.count);
    Codes& edges = all.emplace_back(entry.count);
    std::partial_sum(distances.begin(), distances.end(), edges.begin());
    begin += entry.count;
  }
  return all;
}

CodeSet codes_of(std::size_t entry) {
  static const std::vector<Codes> all = read_edges();
  Codes edges = all[entry];
  for (std::size_t i = 0; kUnicode.properties[entry].bases >> i != 0; ++i) {
    if ((kUnicode.properties[entry].bases >> i & 1U) != 0) {
      Codes both;
      std::ranges::set_symmetric_difference(edges, all[i], std::back_inserter(both));
      edges = std::move(both);
    }
  }
  CodeSet codes;
  for (std::size_t i = 0; i < edges.size(); i += 2) {
    codes.add(edges[i], edges[i + 1] - 1);
  }
  return codes;
}

/// What differs by case alone, by the first of it.
std::map<char32_t, Codes> read_folds() {
  std::map<char32_t, Codes> folds;
  for_each_mapped(kUnicode.folds, [&](char32_t code, std::span<const std::uint32_t> first) {
    folds.try_emplace(first[0], Codes{first[0]}).first->second.push_back(code);
  });
  return folds;
}

std::vector<std::u32string> read_long_folds() {
  std::vector<std::u32string> texts;
  const auto& all = kUnicode.long_folds;
  for (std::size_t i = 0; i < all.size(); i += all[i] + 1) {
    const auto text = all.subspan(i + 1, all[i]);
    texts.emplace_back(text.begin(), text.end());
  }
  return texts;
}

std::unordered_map<char32_t, std::string> read_lower() {
  std::unordered_map<char32_t, std::string> lower;
  for_each_mapped(kUnicode.lower, [&](char32_t code, std::span<const std::uint32_t> text) {
    for (const std::uint32_t part : text) {
      append_character(part, lower[code]);
    }
  });
  return lower;
}

bool is_space(char32_t code) {
  return unicode_codes(CodeKind::kStrippedSpace).contains(code);
}

}  // namespace

std::optional<CodeSet> unicode_property(std::string_view name) {
  for (std::size_t i = 0; i < kUnicode.properties.size(); ++i) {
    if (has_name(kUnicode.properties[i].names, name)) {
      return codes_of(i);
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
  for (const auto& [first, cases] : folds) {
    if (std::ranges::any_of(cases, [&](char32_t code) { return codes.contains(code); })) {
      for (const char32_t code : cases) {
        all.add(code, code);
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
