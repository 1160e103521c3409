#include "pattern/symbols.h"

#include <algorithm>
#include <map>

#include "unicode/utf8.h"

namespace tessera::data {
namespace {

constexpr char32_t kAscii = 0x80;
constexpr std::size_t kLastSymbol = 0xff;
/// Far above any tokenizer's pattern: work grows with the product of these two.
constexpr std::size_t kMaxSets = 2000;

/// Where one of the sets begins or has ended, beyond ASCII.
std::vector<char32_t> borders_of(const std::vector<CodeSet>& sets) {
  std::vector<char32_t> borders{kAscii};
  for (const CodeSet& set : sets) {
    for (const CodeSet::Range range : set.ranges()) {
      for (const char32_t border : {range.first, static_cast<char32_t>(range.last + 1)}) {
        if (border > kAscii && border <= kLastCode) {
          borders.push_back(border);
        }
      }
    }
  }
  std::ranges::sort(borders);
  borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
  return borders;
}

std::vector<bool> sets_of(char32_t code, const std::vector<CodeSet>& sets) {
  std::vector<bool> in(sets.size());
  std::transform(sets.begin(), sets.end(), in.begin(),
                 [&](const CodeSet& set) { return set.contains(code); });
  return in;
}

}  // namespace

std::optional<Symbols> Symbols::telling_apart(const std::vector<CodeSet>& sets) {
  if (sets.size() > kMaxSets) {
    return std::nullopt;
  }
  std::vector<Bytes> bytes_of(sets.size());
  const auto add = [&](char32_t code, std::size_t byte) {
    for (std::size_t set = 0; set < sets.size(); ++set) {
      if (sets[set].contains(code)) {
        bytes_of[set].push_back(static_cast<unsigned char>(byte));
      }
    }
  };
  Bytes symbols(kLastCode + 1);
  for (char32_t code = 0; code < kAscii; ++code) {
    add(code, code);
    symbols[code] = static_cast<unsigned char>(code);
  }
  std::vector<char32_t> borders = borders_of(sets);
  borders.push_back(kLastCode + 1);
  std::map<std::vector<bool>, std::size_t> kinds;
  for (std::size_t i = 0; i + 1 < borders.size(); ++i) {
    const auto [kind, is_new] = kinds.try_emplace(sets_of(borders[i], sets), kAscii + kinds.size());
    if (kind->second > kLastSymbol) {
      return std::nullopt;
    }
    if (is_new) {
      add(borders[i], kind->second);
    }
    std::fill(symbols.begin() + borders[i], symbols.begin() + borders[i + 1],
              static_cast<unsigned char>(kind->second));
  }
  return Symbols(symbols, std::move(bytes_of));
}

std::string Symbols::of(std::string_view text) const {
  std::string out(text.size(), '\0');
  std::size_t count = 0;
  while (!text.empty()) {
    const auto first = static_cast<unsigned char>(text[0]);
    if (first < kAscii) {
      out[count++] = text[0];
      text.remove_prefix(1);
      continue;
    }
    const std::size_t bytes = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    out[count++] = static_cast<char>(symbols_[code_point(text.substr(0, bytes))]);
    text.remove_prefix(bytes);
  }
  out.resize(count);
  return out;
}

}  // namespace tessera::data
