#include "pattern/pattern_syntax.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <variant>
#include <vector>

#include "pattern/class_reader.h"
#include "tessera/core/error.h"
#include "unicode/properties.h"
#include "unicode/utf8.h"

namespace tessera::data {
namespace {

constexpr std::array<std::string_view, 7> kGroups{"?:", "?=", "?!", "?<=", "?<!", "?>", "?i:"};

std::string hexadecimal(unsigned char byte) {
  constexpr const char* kDigits = "0123456789abcdef";
  return {'\\', 'x', kDigits[byte / 16], kDigits[byte % 16]};
}

/// A class of bytes. None at all is one that never matches.
std::string class_of(const std::vector<unsigned char>& bytes) {
  if (bytes.empty()) {
    return "[^\\x00-\\xff]";
  }
  if (bytes.size() == 1) {
    return hexadecimal(bytes[0]);
  }
  std::string text = "[";
  for (std::size_t i = 0; i < bytes.size();) {
    std::size_t last = i;
    while (last + 1 < bytes.size() && bytes[last + 1] == bytes[last] + 1) {
      ++last;
    }
    text += hexadecimal(bytes[i]) + (last > i ? "-" + hexadecimal(bytes[last]) : "");
    i = last + 1;
  }
  return text + "]";
}

/// An expression whose sets of characters are not written yet.
class SetExpression {
 public:
  void add(std::string_view syntax) { parts_.emplace_back(std::string(syntax)); }

  void add(const CodeSet& set) {
    const auto same = [&](const CodeSet& other) { return other.ranges() == set.ranges(); };
    const auto known = std::ranges::find_if(sets_, same);
    parts_.emplace_back(static_cast<std::size_t>(known - sets_.begin()));
    if (known == sets_.end()) {
      sets_.push_back(set);
    }
  }

  /// `whole`: for the message.
  ByteExpression written(std::string_view whole) const {
    auto symbols = Symbols::telling_apart(sets_);
    TESSERA_CHECK(symbols, "the tokenizer's pattern '", printable(whole),
                  "' tells more kinds of characters apart than any tokenizer's; use one with a "
                  "simpler pattern");
    std::string text;
    for (const auto& part : parts_) {
      const auto* const syntax = std::get_if<std::string>(&part);
      text +=
          syntax != nullptr ? *syntax : class_of(symbols->bytes_of(std::get<std::size_t>(part)));
    }
    return {std::move(text), *std::move(symbols)};
  }

 private:
  std::vector<std::variant<std::string, std::size_t>> parts_;  ///< syntax, or the number of a set
  std::vector<CodeSet> sets_;
};

/// Reads an expression token by token. What is not known to mean the same in Oniguruma and in PCRE2
/// is refused.
class Translation {
 public:
  explicit Translation(std::string_view expression) : whole_(expression), reader_(expression) {}

  ByteExpression run() {
    while (!reader_.rest().empty()) {
      step();
    }
    return out_.written(whole_);
  }

 private:
  void step() {
    const std::string_view rest = reader_.rest();
    switch (rest[0]) {
      case '\\':
        escape();
        break;
      case '(':
        group();
        break;
      case ')':
        if (folds_.size() > 1) {
          folds_.pop_back();
        }
        copy(1);
        break;
      case '[':
        literal_.clear();
        out_.add(reader_.take_class(folds_.back()));
        break;
      case '.':
        literal_.clear();
        out_.add(CodeSet(U'\n').complement());
        reader_.skip(1);
        break;
      case '{':
        interval();
        break;
      case '|':
      case '*':
      case '+':
      case '?':
      case '^':
      case '$':
        copy(1);
        break;
      default:
        character(reader_.take_character());
    }
  }

  void character(char32_t code) {
    out_.add(folds_.back() ? with_other_cases(CodeSet(code)) : CodeSet(code));
    // (?i:ss) is (?i:ß), too.
    literal_ += code;
    for (const std::u32string& text : long_case_folds()) {
      const bool found =
          folds_.back() &&
          std::ranges::equal(text, last_literal(text.size()), [](char32_t a, char32_t b) {
            return with_other_cases(CodeSet(a)).contains(b);
          });
      reader_.refuse_if(found, "(?i:" + utf8(text));
    }
  }

  std::u32string_view last_literal(std::size_t size) const {
    const std::u32string_view all = literal_;
    return all.substr(all.size() - std::min(all.size(), size));
  }

  static std::string utf8(const std::u32string& text) {
    std::string out;
    for (const char32_t code : text) {
      append_character(code, out);
    }
    return out;
  }

  void escape() {
    const std::string_view rest = reader_.rest();
    const char kind = rest.size() > 1 ? rest[1] : '\0';
    if (kind == 'b' || kind == 'B') {
      word_border(kind == 'B');
      return;
    }
    const CodeSet set = reader_.take_escape(/*in_class=*/false);
    const CodeSet::Range first = set.ranges().empty() ? CodeSet::Range{} : set.ranges().front();
    if (set.ranges().size() == 1 && first.first == first.last) {
      character(first.first);
      return;
    }
    literal_.clear();
    out_.add(set);
  }

  void word_border(bool negated) {
    reader_.skip(2);
    literal_.clear();
    const CodeSet& word = unicode_codes(CodeKind::kWord);
    const auto look = [&](std::string_view kind) {
      out_.add(kind);
      out_.add(word);
      out_.add(")");
    };
    out_.add(negated ? "(?!" : "(?:");
    look("(?<=");
    look("(?!");
    out_.add("|");
    look("(?<!");
    look("(?=");
    out_.add(")");
  }

  void group() {
    const std::string_view rest = reader_.rest().substr(1);
    folds_.push_back(folds_.back());
    if (!rest.starts_with('?')) {
      copy(1);
      return;
    }
    const auto* const known = std::ranges::find_if(
        kGroups, [&](std::string_view kind) { return rest.starts_with(kind); });
    reader_.refuse_if(known == kGroups.end(), reader_.rest().substr(0, 3));
    if (*known == "?i:") {
      folds_.back() = true;
      literal_.clear();
      out_.add("(?:");
      reader_.skip(4);
      return;
    }
    copy(1 + known->size());
  }

  void interval() {
    const std::string_view rest = reader_.rest();
    const std::size_t end = rest.find('}');
    // {n,m}+ repeats a repetition in Oniguruma and is possessive in PCRE2; {n}? makes one optional
    // in the former and takes few in the latter; {,m} is an interval in the former alone.
    reader_.refuse_if(end == std::string_view::npos, "{");
    reader_.refuse_if(rest.substr(end + 1).starts_with('+'), "{}+");
    reader_.refuse_if(rest.substr(end + 1).starts_with('?'), "{}?");
    reader_.refuse_if(rest.starts_with("{,"), "{,}");
    const std::string_view numbers = rest.substr(1, end - 1);
    const bool is_interval = !numbers.empty() &&
                             numbers.find_first_not_of("0123456789,") == std::string::npos &&
                             std::ranges::count(numbers, ',') <= 1;
    if (is_interval) {
      copy(end + 1);
    } else {
      character(reader_.take_character());
    }
  }

  void copy(std::size_t bytes) {
    literal_.clear();
    out_.add(reader_.rest().substr(0, bytes));
    reader_.skip(bytes);
  }

  std::string_view whole_;
  ClassReader reader_;
  SetExpression out_;
  std::vector<bool> folds_{false};  ///< for each group that is open, whether it is (?i:)
  std::u32string literal_;          ///< the characters before, without anything between them
};

}  // namespace

ByteExpression translate_pattern(std::string_view expression) {
  return Translation(expression).run();
}

ByteExpression translate_set(const CodeSet& set) {
  SetExpression out;
  out.add(set);
  return out.written("");
}

}  // namespace tessera::data
