#define PCRE2_CODE_UNIT_WIDTH 8
#include "pipeline/pattern_syntax.h"

#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "tessera/core/error.h"
#include "tokenizer/utf8.h"

namespace tessera::data {
namespace {

constexpr std::array<std::string_view, 7> kGroups{"?:", "?=", "?!", "?<=", "?<!", "?>", "?i:"};

bool is_ascii_alphanumeric(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 && static_cast<unsigned char>(c) < 0x80;
}

/// Two hexadecimal digits from 80 up: behind \x a byte in Oniguruma, a character in PCRE2.
bool is_high_byte(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdefABCDEF";
  constexpr std::string_view kHighDigits = "89abcdefABCDEF";
  return text.size() > 1 && kHighDigits.find(text[0]) != kHighDigits.npos &&
         kDigits.find(text[1]) != kDigits.npos;
}

/// Characters of words, within a class. Outside of one, Oniguruma has some numbers of Latin-1 more.
constexpr std::string_view kWord = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}";
constexpr std::string_view kMoreOfWords = "\\x{b2}\\x{b3}\\x{b9}\\x{bc}\\x{bd}\\x{be}";

/// Whether PCRE2 knows a script of this name.
bool is_script(std::string_view name) {
  const std::string pattern = "\\p{sc:" + std::string(name) + "}";
  int error = 0;
  PCRE2_SIZE place = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   PCRE2_UTF, &error, &place, nullptr);
  pcre2_code_free(code);
  return code != nullptr;
}

/// Copies an expression token by token. What is not known to mean the same in both is refused.
class Translation {
 public:
  explicit Translation(std::string_view expression) : whole_(expression), rest_(expression) {}

  std::string run() {
    while (!rest_.empty()) {
      step();
    }
    return std::move(out_);
  }

 private:
  void step() {
    switch (rest_[0]) {
      case '\\':
        escape();
        break;
      case '(':
        group();
        break;
      case '[':
        begin_class();
        break;
      case ']':
        in_class_ = false;
        copy(1);
        break;
      case '{':
        interval();
        break;
      case '&':
        // Oniguruma's intersection of classes.
        refuse_if(in_class_ && rest_.starts_with("&&"), "&&");
        copy(1);
        break;
      default:
        copy(1);
    }
  }

  void escape() {
    refuse_if(rest_.size() < 2, "\\");
    const char kind = rest_[1];
    if (kind == 's' || kind == 'S') {
      // PCRE2's \s has U+180E, which is no white space any more.
      out_ += kind == 's' ? "\\p{White_Space}" : "\\P{White_Space}";
      rest_.remove_prefix(2);
      return;
    }
    if (kind == 'w' || kind == 'W' || kind == 'b' || kind == 'B') {
      word(kind);
      return;
    }
    if (kind == 'p' || kind == 'P') {
      property(kind);
      return;
    }
    const bool same = std::string_view("dDrntfx").find(kind) != std::string_view::npos ||
                      !is_ascii_alphanumeric(kind);
    refuse_if(!same, rest_.substr(0, 2));
    refuse_if(kind == 'x' && is_high_byte(rest_.substr(2)), rest_.substr(0, 4));
    const bool braces = is_ascii_alphanumeric(kind) && rest_.substr(2).starts_with('{');
    copy(braces ? std::max<std::size_t>(rest_.find('}'), 2) : 2);
  }

  /// The same characters as in Oniguruma. A backspace within a class is "\b" to both.
  void word(char kind) {
    refuse_if(in_class_ && kind != 'w' && kind != 'b', rest_.substr(0, 2));
    const std::string in = "[" + std::string(kWord) + std::string(kMoreOfWords) + "]";
    if (in_class_) {
      out_ += kind == 'w' ? kWord : "\\b";
    } else if (kind == 'w' || kind == 'W') {
      out_ += kind == 'w' ? in : "[^" + std::string(kWord) + "]";
    } else {
      const std::string at_end = "(?<=" + in + ")(?!" + in + ")";
      const std::string at_begin = "(?<!" + in + ")(?=" + in + ")";
      out_ += (kind == 'b' ? "(?:" : "(?!") + at_end + "|" + at_begin + ")";
    }
    rest_.remove_prefix(2);
  }

  /// A property needs braces in Oniguruma, and a script is Script there, not Script_Extensions.
  void property(char kind) {
    const std::size_t end = rest_.find('}');
    if (!rest_.substr(2).starts_with('{') || end == std::string_view::npos) {
      out_ += kind;
      rest_.remove_prefix(2);
      return;
    }
    std::string_view name = rest_.substr(3, end - 3);
    const bool negated = name.starts_with('^');
    name.remove_prefix(negated ? 1 : 0);
    out_ += "\\" + std::string(1, kind) + (negated ? "{^" : "{") + (is_script(name) ? "sc:" : "");
    out_ += std::string(name) + "}";
    rest_.remove_prefix(end + 1);
  }

  void group() {
    if (in_class_ || !rest_.substr(1).starts_with('?')) {
      copy(1);
      return;
    }
    for (const std::string_view known : kGroups) {
      if (rest_.substr(1).starts_with(known)) {
        copy(1 + known.size());
        return;
      }
    }
    refuse_if(true, rest_.substr(0, 3));
  }

  void begin_class() {
    // A class in a class is a union in Oniguruma and two characters in PCRE2.
    refuse_if(in_class_, "[ in a class");
    in_class_ = true;
    copy(rest_.starts_with("[^") ? 2 : 1);
    refuse_if(rest_.starts_with(']'), "[]");
  }

  void interval() {
    const std::size_t end = rest_.find('}');
    if (!in_class_) {
      // {n,m}+ repeats a repetition in Oniguruma and is possessive in PCRE2; {n}? makes one
      // optional in the former and takes few in the latter; {,m} is an interval in the former
      // alone.
      refuse_if(end == std::string_view::npos, "{");
      refuse_if(rest_.substr(end + 1).starts_with('+'), "{}+");
      refuse_if(rest_.substr(end + 1).starts_with('?'), "{}?");
      refuse_if(rest_.starts_with("{,"), "{,}");
    }
    copy(1);
  }

  void copy(std::size_t bytes) {
    bytes = std::min(bytes, rest_.size());
    out_ += rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
  }

  void refuse_if(bool condition, std::string_view construct) const {
    TESSERA_CHECK(!condition, "the tokenizer's pattern '", printable(whole_), "' has '",
                  printable(construct), "', which is not implemented");
  }

  std::string_view whole_;
  std::string_view rest_;
  std::string out_;
  bool in_class_ = false;
};

}  // namespace

std::string translate_pattern(std::string_view expression) {
  return Translation(expression).run();
}

std::string quote_pattern(std::string_view text) {
  std::string out;
  for (const char c : text) {
    // Only ASCII punctuation means anything.
    if (!is_ascii_alphanumeric(c) && static_cast<unsigned char>(c) > ' ' &&
        static_cast<unsigned char>(c) < 0x80) {
      out.push_back('\\');
    }
    out.push_back(c);
  }
  return out;
}

}  // namespace tessera::data
