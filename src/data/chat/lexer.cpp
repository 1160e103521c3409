#include "chat/lexer.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "chat/texts.h"
#include "chat/value.h"
#include "tessera/core/error.h"
#include "unicode/utf8.h"

namespace tessera::data::chat {
namespace {

bool is_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// With LF alone, and without the last.
std::string plain_lines(std::string_view source) {
  std::string valid;
  TESSERA_CHECK(replace_invalid_utf8(source, valid) == source, "it is not valid UTF-8");
  std::string text;
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      i += i + 1 < source.size() && source[i + 1] == '\n' ? 1 : 0;
      text += '\n';
    } else {
      text += source[i];
    }
  }
  if (text.ends_with('\n')) {
    text.pop_back();
  }
  return text;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(plain_lines(source)) {}

  std::vector<TemplatePart> run() {
    while (at_ < source_.size()) {
      const std::size_t tag = next_tag();
      std::string text = source_.substr(at_, tag - at_);
      const bool is_tag = tag < source_.size();
      if (is_tag) {
        strip_end(text, source_[tag + 1], tag + 2 < source_.size() ? source_[tag + 2] : ' ');
      }
      strip_begin(text);
      if (!text.empty()) {
        parts_.push_back({TemplatePart::Kind::kText, line_, std::move(text), {}});
      }
      go_to(tag);
      if (is_tag) {
        take_tag();
      }
    }
    return std::move(parts_);
  }

 private:
  std::size_t next_tag() const {
    for (std::size_t at = source_.find('{', at_); at != std::string::npos;
         at = source_.find('{', at + 1)) {
      if (at + 1 < source_.size() &&
          std::string_view("{%#").find(source_[at + 1]) != std::string::npos) {
        return at;
      }
    }
    return source_.size();
  }

  void go_to(std::size_t at) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                         source_.begin() + static_cast<std::ptrdiff_t>(at), '\n'));
    at_ = at;
  }

  /// Before a tag: all white space for "-", that of its line before what is no "{{".
  void strip_end(std::string& text, char kind, char sign) const {
    if (sign == '-') {
      text = stripped(text, {}, /*left=*/false, /*right=*/true);
      return;
    }
    const std::size_t line = text.rfind('\n') + 1;  // 0 where there is none
    const bool begins_line = line > 0 || at_ == 0 || source_[at_ - 1] == '\n';
    if (kind != '{' && sign != '+' && begins_line &&
        stripped(text.substr(line), {}, /*left=*/true, /*right=*/false).empty()) {
      text.erase(line);
    }
  }

  /// Behind a tag that ends in "-".
  void strip_begin(std::string& text) {
    if (strips_) {
      text = stripped(text, {}, /*left=*/true, /*right=*/false);
    }
    strips_ = false;
  }

  void take_tag() {
    const char kind = source_[at_ + 1];
    const int line = line_;
    if (kind == '#') {
      const std::size_t end = source_.find("#}", at_ + 2);
      TESSERA_CHECK(end != std::string::npos, "line ", line, ": a comment does not end");
      end_tag(end, '#');
      return;
    }
    const std::size_t sign =
        at_ + 2 < source_.size() && (source_[at_ + 2] == '-' || source_[at_ + 2] == '+') ? 1 : 0;
    go_to(at_ + 2 + sign);
    TemplatePart part{
        kind == '{' ? TemplatePart::Kind::kExpression : TemplatePart::Kind::kStatement,
        line,
        "",
        {}};
    const std::string_view end = kind == '{' ? "}}" : "%}";
    int open = 0;
    while (true) {
      go_to(std::min(source_.find_first_not_of(kSpaces, at_), source_.size()));
      TESSERA_CHECK(at_ < source_.size(), "line ", line, ": a tag does not end");
      const std::string_view rest = std::string_view(source_).substr(at_);
      const bool has_sign = rest[0] == '-' || rest[0] == '+';
      if (open <= 0 && rest.substr(has_sign ? 1 : 0).starts_with(end)) {
        part.tokens.push_back({});
        parts_.push_back(std::move(part));
        end_tag(at_ + (has_sign ? 1 : 0), kind);
        return;
      }
      part.tokens.push_back(take_token());
      const std::string& text = part.tokens.back().text;
      if (part.tokens.back().kind == Token::Kind::kSymbol && text.size() == 1) {
        open += std::string_view("([{").find(text) != std::string::npos ? 1 : 0;
        open -= std::string_view(")]}").find(text) != std::string::npos ? 1 : 0;
      }
    }
  }

  /// `at`: of its two last characters. A line end behind a block or a comment goes with it.
  void end_tag(std::size_t at, char kind) {
    const char sign = source_[at - 1];
    strips_ = sign == '-';
    const bool trims =
        kind != '{' && sign != '+' && at + 2 < source_.size() && source_[at + 2] == '\n';
    go_to(at + (trims ? 3 : 2));
  }

  Token take_token() {
    const std::string_view rest = std::string_view(source_).substr(at_);
    if (rest[0] == '"' || rest[0] == '\'') {
      return take_text();
    }
    if (is_digit(rest[0])) {
      return take_number(rest);
    }
    if (is_name(rest[0])) {
      const auto* const end = std::ranges::find_if_not(rest, is_name);
      return take(Token::Kind::kName, static_cast<std::size_t>(end - rest.begin()));
    }
    constexpr std::array<std::string_view, 6> kPairs{"==", "!=", "<=", ">=", "//", "**"};
    if (std::ranges::find(kPairs, rest.substr(0, 2)) != kPairs.end()) {
      return take(Token::Kind::kSymbol, 2);
    }
    TESSERA_CHECK(std::string_view("+-*/%~<>=()[]{},.:|").find(rest[0]) != std::string::npos,
                  "line ", line_, ": '", printable(rest.substr(0, 1)), "' has no meaning there");
    return take(Token::Kind::kSymbol, 1);
  }

  Token take(Token::Kind kind, std::size_t bytes) {
    Token token{kind, source_.substr(at_, bytes)};
    at_ += bytes;
    return token;
  }

  Token take_number(std::string_view rest) {
    std::size_t end = 0;
    while (end < rest.size() && (is_digit(rest[end]) || rest[end] == '_')) {
      ++end;
    }
    const bool is_float = end + 1 < rest.size() && rest[end] == '.' && is_digit(rest[end + 1]);
    for (end += is_float ? 1 : 0; is_float && end < rest.size() && is_digit(rest[end]);) {
      ++end;
    }
    Token token = take(is_float ? Token::Kind::kFloat : Token::Kind::kInteger, end);
    std::erase(token.text, '_');
    return token;
  }

  Token take_text() {
    const char quote = source_[at_];
    Token token{Token::Kind::kText, ""};
    std::size_t at = at_ + 1;
    for (; at < source_.size() && source_[at] != quote; ++at) {
      if (source_[at] != '\\' || at + 1 == source_.size()) {
        token.text += source_[at];
        continue;
      }
      ++at;
      constexpr std::string_view kEscapes = "n\nt\tr\rb\bf\fv\va\a\\\\'\'\"\"";
      std::size_t known = 0;
      while (known < kEscapes.size() && kEscapes[known] != source_[at]) {
        known += 2;
      }
      if (known < kEscapes.size()) {
        token.text += kEscapes[known + 1];
      } else {
        TESSERA_CHECK(source_[at] != 'x' && source_[at] != 'u' && source_[at] != 'U' &&
                          !is_digit(source_[at]),
                      "line ", line_, ": '\\", source_[at], "' in a text is not implemented");
        token.text += {'\\', source_[at]};
      }
    }
    TESSERA_CHECK(at < source_.size(), "line ", line_, ": a text does not end");
    go_to(at + 1);
    return token;
  }

  std::string source_;
  std::size_t at_ = 0;
  int line_ = 1;
  bool strips_ = false;  ///< white space at the begin of the next text
  std::vector<TemplatePart> parts_;
};

}  // namespace

std::vector<TemplatePart> parts_of(std::string_view source) {
  return Lexer(source).run();
}

}  // namespace tessera::data::chat
