#pragma once

#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

struct pcre2_real_code_8;

namespace tessera::data {

/// A regular expression of a tokenizer. The syntax is Oniguruma's, which the `tokenizers` package
/// uses; PCRE2 runs it. The expression may be untrusted, so a search has limits. Immutable.
class Pattern {
 public:
  /// Throws Error for an expression that is wrong or not implemented.
  explicit Pattern(std::string_view expression);
  /// Matches `text` itself.
  static Pattern literal(std::string_view text);

  using OnMatch = c10::function_ref<void(std::size_t begin, std::size_t end)>;
  /// Reports all matches in valid UTF-8 from left to right, empty matches too. Throws Error if the
  /// search exceeds a limit.
  void for_each_match(std::string_view text, OnMatch on_match) const;

 private:
  struct Free {
    void operator()(pcre2_real_code_8* code) const;
  };

  std::string expression_;  ///< as given, for messages
  std::string literal_;     ///< matched in place of the expression, unless empty
  std::unique_ptr<pcre2_real_code_8, Free> code_;
};

}  // namespace tessera::data
