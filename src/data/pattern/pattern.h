#pragma once

#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "pattern/pattern_syntax.h"

struct pcre2_real_code_8;

namespace tessera::data {

/// A regular expression of a tokenizer, in the syntax of Oniguruma, which Hugging Face's library
/// uses. PCRE2 runs it on Symbols, within a limit, as the expression may be untrusted. Immutable.
class Pattern {
 public:
  /// Throws Error for an expression that is wrong or not implemented.
  explicit Pattern(std::string_view expression);
  /// Matches `text` itself.
  static Pattern literal(std::string_view text);
  /// Matches a character of a set. `name`: for messages.
  static Pattern one_of(const CodeSet& set, std::string_view name);

  using OnMatch = c10::function_ref<void(std::size_t begin, std::size_t end)>;
  /// The matches in valid UTF-8 from left to right, empty ones too. Throws Error beyond the limit.
  void for_each_match(std::string_view text, OnMatch on_match) const;

 private:
  struct Free {
    void operator()(pcre2_real_code_8* code) const;
  };

  Pattern(std::string_view expression, ByteExpression translated);

  std::string expression_;  ///< as it was given, for messages
  std::string literal_;     ///< what it matches in place of an expression, unless it is empty
  Symbols symbols_;
  std::unique_ptr<pcre2_real_code_8, Free> code_;
};

}  // namespace tessera::data
