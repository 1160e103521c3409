#include "pattern/class_reader.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <optional>
#include <string>
#include <utility>

#include "tessera/core/error.h"
#include "unicode/properties.h"
#include "unicode/utf8.h"

namespace tessera::data {
namespace {

constexpr int kMaxClassDepth = 16;

bool is_ascii_alphanumeric(char c) {
  return static_cast<unsigned char>(c) < 0x80 && std::isalnum(static_cast<unsigned char>(c)) != 0;
}

CodeSet complement_if(bool negated, CodeSet set) {
  return negated ? set.complement() : std::move(set);
}

/// In lower case, without what names may be written with.
std::string plain_name(std::string_view name) {
  std::string plain;
  for (const char c : name) {
    if (c != ' ' && c != '_' && c != '-') {
      plain.push_back(static_cast<char>(std::tolower(static_cast<unsigned char>(c))));
    }
  }
  return plain;
}

/// A property by a name of the expression; nothing for another.
std::optional<CodeSet> property_of(std::string_view name) {
  const std::string plain = plain_name(name);
  return std::ranges::all_of(plain, is_ascii_alphanumeric) ? unicode_property(plain) : std::nullopt;
}

/// The character of "\X", where X is `kind`.
std::optional<char32_t> control_of(char kind) {
  constexpr std::array<std::pair<char, char32_t>, 7> kControls{
      {{'n', '\n'}, {'r', '\r'}, {'t', '\t'}, {'f', '\f'}, {'v', '\v'}, {'a', '\a'}, {'e', 0x1b}}};
  const auto* const found = std::ranges::find(kControls, kind, &std::pair<char, char32_t>::first);
  return found == kControls.end() ? std::nullopt : std::optional(found->second);
}

/// Whether it has a character that (?i:) takes for several.
bool has_long_folds(const CodeSet& set) {
  return std::ranges::any_of(long_case_folds(), [&](const std::u32string& text) {
    return text.size() == 1 && set.contains(text[0]);
  });
}

std::optional<CodeSet> named_set(char kind, bool in_class) {
  switch (kind) {
    case 'w':
      return unicode_codes(in_class ? CodeKind::kWordInClass : CodeKind::kWord);
    case 'W':
      return unicode_codes(in_class ? CodeKind::kNoWordInClass : CodeKind::kNoWord);
    case 's':
    case 'S':
      return complement_if(kind == 'S', unicode_codes(CodeKind::kSpace));
    case 'd':
    case 'D':
      return complement_if(kind == 'D', unicode_codes(CodeKind::kDigit));
    case 'h':
    case 'H':
      return complement_if(kind == 'H', unicode_codes(CodeKind::kHexDigit));
    default:
      return std::nullopt;
  }
}

}  // namespace

/// An element of a class: a character, which may begin a range, or a set.
struct ClassReader::Item {
  CodeSet set;
  std::optional<char32_t> character;
};

void ClassReader::refuse_if(bool condition, std::string_view construct) const {
  TESSERA_CHECK(!condition, "the tokenizer's pattern '", printable(whole_), "' has '",
                printable(construct), "', which is not implemented");
}

char32_t ClassReader::take_character() {
  const std::string_view character = rest_.substr(0, first_character(rest_).bytes);
  skip(character.size());
  return code_point(character);
}

/// What is between rest_[begin] and the next `end`; both are taken.
std::string_view ClassReader::take_until(char end, std::size_t begin) {
  const std::size_t at = rest_.find(end, begin);
  refuse_if(at == std::string_view::npos, rest_.substr(0, begin));
  const std::string_view between = rest_.substr(begin, at - begin);
  skip(at + 1);
  return between;
}

/// \x1F, \x{1F600}, \u1F60.
char32_t ClassReader::take_number() {
  const std::string_view construct = rest_.substr(0, 4);
  std::string_view digits = rest_.substr(2, rest_[1] == 'x' ? 2 : 4);
  if (rest_.starts_with("\\x{")) {
    digits = take_until('}', 3);
  } else {
    refuse_if(digits.size() < (rest_[1] == 'x' ? 2 : 4), construct);
    skip(2 + digits.size());
  }
  std::uint32_t code = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
  refuse_if(error != std::errc() || end != digits.data() + digits.size() || code > kLastCode,
            construct);
  // From 80 up two digits are a byte, not a character.
  refuse_if(construct[1] == 'x' && construct[2] != '{' && code >= 0x80, construct);
  return code;
}

CodeSet ClassReader::take_property() {
  const bool negated = rest_[1] == 'P';
  const std::string_view construct = rest_.substr(0, rest_.find('}') + 1);
  std::string_view name = take_until('}', 3);
  const bool inverted = name.starts_with('^');
  name.remove_prefix(inverted ? 1 : 0);
  const auto set = property_of(name);
  refuse_if(!set, construct);
  return complement_if(negated != inverted, *set);
}

CodeSet ClassReader::take_escape(bool in_class) {
  refuse_if(rest_.size() < 2, "\\");
  const char kind = rest_[1];
  if (auto set = named_set(kind, in_class)) {
    skip(2);
    return *std::move(set);
  }
  if (kind == 'p' || kind == 'P') {
    if (rest_.substr(2).starts_with('{')) {
      return take_property();
    }
    skip(2);
    return CodeSet(static_cast<char32_t>(kind));  // a property needs braces
  }
  if (kind == 'x' || kind == 'u') {
    return CodeSet(take_number());
  }
  if (const auto control = kind == 'b' && in_class ? U'\b' : control_of(kind)) {
    skip(2);
    return CodeSet(*control);
  }
  refuse_if(is_ascii_alphanumeric(kind), rest_.substr(0, 2));
  skip(1);
  return CodeSet(take_character());
}

/// [:alpha:] within a class.
CodeSet ClassReader::take_posix() {
  const std::string_view construct = rest_.substr(0, rest_.find(']') + 1);
  std::string_view name = take_until(']', 2);
  refuse_if(!name.ends_with(':'), construct);
  name.remove_suffix(1);
  const bool inverted = name.starts_with('^');
  name.remove_prefix(inverted ? 1 : 0);
  // Not those of the property by this name: [:punct:] has symbols.
  const auto set = unicode_property(":" + std::string(name) + ":");
  refuse_if(!set, construct);
  return complement_if(inverted, *set);
}

ClassReader::Item ClassReader::take_item() {
  if (rest_.starts_with("[:")) {
    return {take_posix(), std::nullopt};
  }
  if (rest_[0] == '[') {
    return {take_class(/*fold=*/false), std::nullopt};
  }
  if (rest_[0] != '\\') {
    const char32_t code = take_character();
    return {CodeSet(code), code};
  }
  const bool is_named =
      rest_.size() > 1 &&
      (named_set(rest_[1], true) || rest_.starts_with("\\p{") || rest_.starts_with("\\P{"));
  CodeSet set = take_escape(/*in_class=*/true);
  const auto code = is_named ? std::nullopt : std::optional(set.ranges().front().first);
  return {std::move(set), code};
}

/// Up to "]" or "&&": characters, ranges and sets, all of them together.
CodeSet ClassReader::take_items() {
  CodeSet all;
  while (!rest_.empty() && rest_[0] != ']' && !rest_.starts_with("&&")) {
    const std::string_view begin = rest_;
    const Item item = take_item();
    all.add(item.set);
    const bool is_range = rest_.size() > 1 && rest_[0] == '-' && rest_[1] != ']';
    if (!is_range) {
      continue;
    }
    skip(1);
    refuse_if(rest_[0] == '[' || rest_.starts_with("&&"), begin.substr(0, 3));
    const Item last = take_item();
    const std::string_view range = begin.substr(0, begin.size() - rest_.size());
    refuse_if(!item.character || !last.character || *last.character < *item.character, range);
    all.add(*item.character, *last.character);
    if (rest_.size() > 1 && rest_[0] == '-' && rest_[1] != ']') {
      all.add('-', '-');  // behind a range it is itself
      skip(1);
    }
  }
  return all;
}

/// Classes in a class are added, "&&" binds less. Case is that of the whole class, before "^".
CodeSet ClassReader::take_class(bool fold) {
  const std::string_view begin = rest_;
  refuse_if(++depth_ > kMaxClassDepth, "[[");
  const bool negated = rest_.starts_with("[^");
  skip(negated ? 2 : 1);
  refuse_if(rest_.starts_with(']'), "[]");
  CodeSet all = take_items();
  while (rest_.starts_with("&&")) {
    skip(2);
    all = all.intersected(take_items());
  }
  TESSERA_CHECK(!rest_.empty(), "the tokenizer's pattern '", printable(whole_),
                "' is not a regular expression (a class without its ])");
  skip(1);
  --depth_;
  const std::string construct(begin.substr(0, begin.size() - rest_.size()));
  refuse_if(fold && !negated && has_long_folds(all), "(?i:" + construct);
  return complement_if(negated, fold ? with_other_cases(all) : all);
}

}  // namespace tessera::data
