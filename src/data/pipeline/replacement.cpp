#include "pipeline/replacement.h"

#include "tessera/core/error.h"
#include "unicode/utf8.h"

namespace tessera::data {

Pattern read_pattern(const JsonField& field) {
  field.only({"String", "Regex"});
  const JsonField literal = field.at("String");
  const JsonField expression = field.at("Regex");
  field.require(literal.is_null() != expression.is_null(), "one String or one Regex");
  return literal.is_null() ? Pattern(expression.text()) : Pattern::literal(literal.text());
}

const std::string& read_character(const JsonField& field) {
  const std::string& text = field.text();
  field.require(!text.empty() && first_character(text).bytes == text.size(), "one character");
  return text;
}

void check_growth(std::size_t from, std::size_t to) {
  constexpr std::size_t kMaxGrowth = 32;  // of U+FDFA, twice
  constexpr std::size_t kFree = 1000;
  TESSERA_CHECK(to <= kFree + kMaxGrowth * from, "the tokenizer makes of a text of ", from,
                " bytes one of more than ", kMaxGrowth,
                " times as many: use one whose normalizer and decoder replace less");
}

Replacement::Replacement(const JsonField& component)
    : pattern_(read_pattern(component.at("pattern"))), content_(component.at("content").text()) {
  component.only({"pattern", "content"});
}

std::string Replacement::in(std::string_view text) const {
  std::string out;
  std::size_t copied = 0;
  pattern_.for_each_match(text, [&](std::size_t begin, std::size_t end) {
    out += text.substr(copied, begin - copied);
    out += content_;
    check_growth(text.size(), out.size());
    copied = end;
  });
  out += text.substr(copied);
  return out;
}

}  // namespace tessera::data
