// Upper and lower case. The tables have lower case alone: what maps to one character gives the way
// back, and a text with a small letter that has none is refused.

#include "chat/cases.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "chat/texts.h"
#include "tessera/core/error.h"
#include "unicode/properties.h"
#include "unicode/tables.h"
#include "unicode/utf8.h"

namespace tessera::data::chat {
namespace {

constexpr char32_t kSharpS = 0xdf;
constexpr char32_t kCapitalSigma = 0x3a3;
constexpr char32_t kFinalSigma = 0x3c2;
constexpr char32_t kIotaBelow = 0x345;  ///< a mark whose upper case is a letter

using Codes = std::vector<char32_t>;

struct Sets {
  CodeSet cased = unicode_property("cased").value();
  CodeSet ignorable = unicode_property("caseignorable").value();
  CodeSet upper = unicode_property("uppercase").value();
  CodeSet small = unicode_property("lowercaseletter").value();

  Sets() {
    small.add(unicode_property("titlecaseletter").value());
    small.add(kIotaBelow, kIotaBelow);
  }
};

const Sets& sets() {
  static const Sets all;
  return all;
}

using Uppers = std::unordered_map<char32_t, char32_t>;

Uppers read_uppers() {
  Uppers uppers;
  for_each_mapped(kUnicode.lower, [&](char32_t code, std::span<const std::uint32_t> text) {
    if (text.size() == 1 && sets().upper.contains(code)) {
      uppers.try_emplace(text[0], code);  // the others are signs: OHM SIGN
    }
  });
  return uppers;
}

Codes codes_of(std::string_view text) {
  Codes codes;
  while (!text.empty()) {
    const Utf8Step step = first_character(text);
    TESSERA_CHECK(step.valid, "a text is not valid UTF-8");
    codes.push_back(code_point(text.substr(0, step.bytes)));
    text.remove_prefix(step.bytes);
  }
  return codes;
}

[[noreturn]] void refuse(char32_t code, const std::string& what) {
  std::string character;
  append_character(code, character);
  fail("'", what, "' of a text with '", character,
       "' is not implemented: apply the chat template elsewhere, and give its text");
}

void append_upper(char32_t code, const std::string& what, std::string& out) {
  static const Uppers uppers = read_uppers();
  if (code == kSharpS) {
    out += "SS";
  } else if (const auto found = uppers.find(code); found != uppers.end()) {
    append_character(found->second, out);
  } else if (sets().small.contains(code)) {
    refuse(code, what);
  } else {
    append_character(code, out);
  }
}

/// What a word begins with: not the upper case of letters that are two in one, nor of Georgian's.
void append_title(char32_t code, const std::string& what, std::string& out) {
  const bool is_two = (code >= 0x1c4 && code <= 0x1cc) || (code >= 0x1f1 && code <= 0x1f3);
  const bool is_georgian = code >= 0x10d0 && code <= 0x10ff;
  if (is_two) {
    refuse(code, what);
  }
  if (code == kSharpS) {
    out += "Ss";
  } else if (is_georgian) {
    append_character(code, out);
  } else {
    append_upper(code, what, out);
  }
}

/// Whether it ends a word: a letter comes before it, and none behind it.
bool is_final(const Codes& codes, std::size_t at) {
  const auto is_ignorable = [](char32_t code) { return sets().ignorable.contains(code); };
  const std::span all(codes);
  const auto behind = all.subspan(at + 1);
  const auto next = std::ranges::find_if_not(behind, is_ignorable);
  std::size_t before = at;
  while (before > 0 && is_ignorable(all[before - 1])) {
    --before;
  }
  return before > 0 && sets().cased.contains(all[before - 1]) &&
         (next == behind.end() || !sets().cased.contains(*next));
}

void append_lower_at(const Codes& codes, std::size_t at, std::string& out) {
  if (codes[at] == kCapitalSigma && is_final(codes, at)) {
    append_character(kFinalSigma, out);
  } else {
    append_lower(codes[at], out);
  }
}

bool begins_word(char32_t before) {
  return is_space(before) || std::u32string_view(U"-({[<").find(before) != std::string::npos;
}

}  // namespace

std::string lowered(const std::string& text) {
  const Codes codes = codes_of(text);
  std::string out;
  for (std::size_t i = 0; i < codes.size(); ++i) {
    append_lower_at(codes, i, out);
  }
  return out;
}

std::string uppered(const std::string& text, const std::string& what) {
  std::string out;
  for (const char32_t code : codes_of(text)) {
    append_upper(code, what, out);
  }
  return out;
}

std::string capitalized(const std::string& text, const std::string& what) {
  const Codes codes = codes_of(text);
  std::string out;
  for (std::size_t i = 0; i < codes.size(); ++i) {
    i == 0 ? append_title(codes[i], what, out) : append_lower_at(codes, i, out);
  }
  return out;
}

std::string titled(const std::string& text, const std::string& what) {
  const Codes codes = codes_of(text);
  std::string out;
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const bool within = i > 0 && sets().cased.contains(codes[i - 1]);
    within ? append_lower_at(codes, i, out) : append_title(codes[i], what, out);
  }
  return out;
}

std::string titled_words(const std::string& text, const std::string& what) {
  const Codes codes = codes_of(text);
  std::string out;
  std::string word;
  for (std::size_t i = 0; i < codes.size(); ++i) {
    if (i == 0 || begins_word(codes[i - 1])) {
      out += lowered(std::exchange(word, ""));
      append_upper(codes[i], what, out);
    } else {
      append_character(codes[i], word);
    }
  }
  return out + lowered(word);
}

}  // namespace tessera::data::chat
