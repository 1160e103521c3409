#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::data::chat {

struct Token {
  enum class Kind { kName, kText, kInteger, kFloat, kSymbol, kEnd };
  Kind kind = Kind::kEnd;
  std::string text;
};

/// A part of a template: text, "{{ ... }}" or "{% ... %}".
struct TemplatePart {
  enum class Kind { kText, kExpression, kStatement };
  Kind kind = Kind::kText;
  int line = 1;
  std::string text;           ///< used for text alone
  std::vector<Token> tokens;  ///< used for the others; the last is kEnd
};

/// The parts of a template, without comments and without the white space that Jinja leaves out, by
/// transformers' options (trim_blocks, lstrip_blocks). Throws Error for what does not end.
std::vector<TemplatePart> parts_of(std::string_view source);

}  // namespace tessera::data::chat
