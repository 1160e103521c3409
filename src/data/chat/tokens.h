#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "chat/lexer.h"
#include "tessera/core/error.h"
#include "unicode/utf8.h"

namespace tessera::data::chat {

/// Reads the tokens of one tag.
class Tokens {
 public:
  explicit Tokens(const TemplatePart& part) : part_(part) {}

  int line() const { return part_.line; }
  const Token& peek() const { return part_.tokens[at_]; }
  Token take() { return peek().kind == Token::Kind::kEnd ? peek() : part_.tokens[at_++]; }

  bool next_is(std::string_view text) const {
    return (peek().kind == Token::Kind::kSymbol || peek().kind == Token::Kind::kName) &&
           peek().text == text;
  }
  bool take_if(std::string_view text) {
    const bool is_next = next_is(text);
    at_ += is_next ? 1 : 0;
    return is_next;
  }
  void expect(std::string_view text) {
    TESSERA_CHECK(take_if(text), "line ", line(), ": '", text, "' is missing before '",
                  printable(peek().text), "'");
  }
  std::string name() {
    TESSERA_CHECK(peek().kind == Token::Kind::kName, "line ", line(),
                  ": a name is missing before '", printable(peek().text), "'");
    return take().text;
  }
  void expect_end() const {
    TESSERA_CHECK(peek().kind == Token::Kind::kEnd, "line ", line(), ": '", printable(peek().text),
                  "' is not implemented there");
  }
  std::size_t place() const { return at_; }
  void go_to(std::size_t place) { at_ = place; }
  [[noreturn]] void refuse(std::string_view what) const {
    fail("line ", line(), ": '", printable(what), "' is not implemented");
  }

 private:
  const TemplatePart& part_;
  std::size_t at_ = 0;
};

}  // namespace tessera::data::chat
