#include "unicode/normalization.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "unicode/code_table.h"
#include "unicode/tables.h"
#include "unicode/utf8.h"

namespace tessera::data {
namespace {

using Codes = std::vector<char32_t>;
using Table = CodeTable<std::uint16_t>;

// Hangul by the arithmetic of the Unicode standard, section 3.12.
constexpr char32_t kSyllable = 0xac00, kLead = 0x1100, kVowel = 0x1161, kTrail = 0x11a7;
constexpr char32_t kLeads = 19, kVowels = 21, kTrails = 28, kSyllables = kLeads * kVowels * kTrails;

struct Data {
  Codes parts;                  ///< (length, what a code point is decomposed to)
  Table canonical, compatible;  ///< where in `parts`; 0: the code point is not decomposed
  Table classes;
  CodeTable<unsigned char> seconds;  ///< 1 for what may be composed with the character before it
  std::unordered_map<std::uint64_t, char32_t> compositions;
};

std::uint64_t pair_of(char32_t first, char32_t second) {
  return std::uint64_t{first} << 32 | second;
}

Table combining_classes() {
  std::vector<std::uint16_t> values(kLastCode + 1);
  char32_t code = 0;
  for (std::size_t i = 0; i < kUnicode.classes.size(); i += 3) {
    code += kUnicode.classes[i];
    std::fill_n(values.begin() + code, kUnicode.classes[i + 1],
                static_cast<std::uint16_t>(kUnicode.classes[i + 2]));
  }
  return Table(values);
}

/// What code points are composed of, by code point.
using Pairs = std::map<char32_t, std::pair<char32_t, char32_t>>;

Pairs read_pairs() {
  Pairs pairs;
  char32_t code = 0;
  for (std::size_t i = 0; i < kUnicode.compositions.size(); i += 3) {
    code += kUnicode.compositions[i];
    pairs[code] = {kUnicode.compositions[i + 1], kUnicode.compositions[i + 2]};
  }
  return pairs;
}

/// Only the first of a pair may itself be composed.
std::vector<std::uint32_t> decomposed_pair(char32_t code, const Pairs& pairs) {
  std::vector<std::uint32_t> text;
  for (auto at = pairs.find(code); at != pairs.end(); at = pairs.find(code)) {
    text.push_back(at->second.second);
    code = at->second.first;
  }
  text.push_back(code);
  std::ranges::reverse(text);
  return text;
}

Data read_data() {
  Codes parts{0};
  std::vector<std::uint16_t> places(kLastCode + 1);
  const auto add = [&](char32_t code, std::span<const std::uint32_t> text) {
    places[code] = static_cast<std::uint16_t>(parts.size());
    parts.push_back(static_cast<char32_t>(text.size()));
    parts.insert(parts.end(), text.begin(), text.end());
  };
  std::vector<unsigned char> seconds(kLastCode + 1);
  std::unordered_map<std::uint64_t, char32_t> compositions;
  const Pairs pairs = read_pairs();
  for (const auto& [code, pair] : pairs) {
    add(code, decomposed_pair(code, pairs));
    compositions.emplace(pair_of(pair.first, pair.second), code);
    seconds[pair.second] = 1;
  }
  for_each_mapped(kUnicode.canonical, add);
  const Table canonical(places);
  for_each_mapped(kUnicode.compatible, add);
  return {std::move(parts),    canonical,          Table(places),
          combining_classes(), CodeTable(seconds), std::move(compositions)};
}

const Data& data() {
  static const Data all = read_data();
  return all;
}

void decompose_syllable(char32_t index, Codes& codes) {
  codes.push_back(kLead + index / (kVowels * kTrails));
  codes.push_back(kVowel + index % (kVowels * kTrails) / kTrails);
  if (index % kTrails != 0) {
    codes.push_back(kTrail + index % kTrails);
  }
}

void append_decomposed(char32_t code, bool compatible, const Data& data, Codes& codes) {
  if (code - kSyllable < kSyllables) {
    decompose_syllable(code - kSyllable, codes);
    return;
  }
  const std::size_t at = (compatible ? data.compatible : data.canonical)[code];
  if (at == 0) {
    codes.push_back(code);
    return;
  }
  const auto parts = std::span(data.parts).subspan(at + 1, data.parts[at]);
  codes.insert(codes.end(), parts.begin(), parts.end());
}

/// The canonical ordering: the marks behind a character by their class.
void order_marks(const Data& data, Codes& codes) {
  const auto class_of = [&](char32_t code) { return data.classes[code]; };
  const auto is_mark = [&](char32_t code) { return class_of(code) != 0; };
  for (auto end = codes.begin(); end != codes.end();) {
    const auto begin = std::find_if(end, codes.end(), is_mark);
    end = std::find_if_not(begin, codes.end(), is_mark);
    if (end - begin > 1) {
      std::ranges::stable_sort(begin, end, {}, class_of);
    }
  }
}

/// 0: none.
char32_t composed_of(char32_t first, char32_t second, const Data& data) {
  if (first - kLead < kLeads && second - kVowel < kVowels) {
    return kSyllable + ((first - kLead) * kVowels + (second - kVowel)) * kTrails;
  }
  if (first - kSyllable < kSyllables && (first - kSyllable) % kTrails == 0 && second > kTrail &&
      second < kTrail + kTrails) {
    return first + (second - kTrail);
  }
  if (data.seconds[second] == 0) {
    return 0;
  }
  const auto found = data.compositions.find(pair_of(first, second));
  return found == data.compositions.end() ? 0 : found->second;
}

/// The canonical composition: a mark joins the character before it, unless one between them has its
/// class or a higher one.
void compose(const Data& data, Codes& codes) {
  std::size_t count = 0;
  std::size_t starter = codes.size();
  unsigned last_class = 0;  // of what is between; 0: nothing
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const char32_t code = codes[i];
    const unsigned own_class = data.classes[code];
    if (starter < count && (last_class == 0 || last_class < own_class)) {
      if (const char32_t both = composed_of(codes[starter], code, data)) {
        codes[starter] = both;
        continue;
      }
    }
    starter = own_class == 0 ? count : starter;
    last_class = own_class;
    codes[count++] = code;
  }
  codes.resize(count);
}

}  // namespace

void append_normalized(std::string_view text, NormalizationForm form, std::string& out) {
  const Data& all = data();
  Codes codes;
  codes.reserve(text.size());
  while (!text.empty()) {
    const std::size_t bytes = first_character(text).bytes;
    append_decomposed(code_point(text.substr(0, bytes)), form.compatible, all, codes);
    text.remove_prefix(bytes);
  }
  order_marks(all, codes);
  if (form.composed) {
    compose(all, codes);
  }
  for (const char32_t code : codes) {
    append_character(code, out);
  }
}

}  // namespace tessera::data
