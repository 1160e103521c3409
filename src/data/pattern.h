#pragma once

#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

struct pcre2_real_code_8;

namespace tessera::data {

/// A regular expression of a tokenizer. The syntax is Oniguruma's, which the `tokenizers` package
/// uses; PCRE2 executes it. The expression may be untrusted, so searches are limited in steps and
/// memory. Immutable.
class Pattern {
 public:
  /// Throws Error for an invalid or unsupported expression. A `literal` matches exactly its text.
  explicit Pattern(std::string_view expression, bool literal = false);

  using OnMatch = c10::function_ref<void(std::size_t begin, std::size_t end)>;
  /// Reports all matches in valid UTF-8 from left to right, including empty ones. Throws Error if
  /// the search exceeds a limit.
  void for_each_match(std::string_view text, OnMatch on_match) const;

 private:
  struct Free {
    void operator()(pcre2_real_code_8* code) const;
  };

  std::string expression_;  ///< the untranslated expression, for messages
  std::unique_ptr<pcre2_real_code_8, Free> code_;
};

}  // namespace tessera::data
