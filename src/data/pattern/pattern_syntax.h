#pragma once

#include <string>
#include <string_view>

#include "pattern/symbols.h"

namespace tessera::data {

/// An expression over the bytes of Symbols, in PCRE2's syntax: its library need know nothing of
/// Unicode, nor of case.
struct ByteExpression {
  std::string text;
  Symbols symbols;
};

/// An expression of Oniguruma. Throws Error, with the construct, for what is not implemented.
ByteExpression translate_pattern(std::string_view expression);

/// One that matches a character of a set.
ByteExpression translate_set(const CodeSet& set);

}  // namespace tessera::data
