#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "unicode/code_set.h"

namespace tessera::data {

/// The code points of a property or script as Oniguruma has it, by one of its names in lower case
/// without spaces, "-" and "_". Nothing for a name that is not known.
std::optional<CodeSet> unicode_property(std::string_view name);

/// What stands in patterns for sets without a name, and what steps of a tokenizer without a pattern
/// take for their kind of characters.
enum class CodeKind {
  kWord,             ///< \w outside of a class
  kNoWord,           ///< \W outside of a class
  kWordInClass,      ///< [\w]
  kNoWordInClass,    ///< [\W]
  kSpace,            ///< \s
  kDigit,            ///< \d
  kHexDigit,         ///< \h
  kPunctuationStep,  ///< used by the pre-tokenizer Punctuation
  kDigitsStep,       ///< used by the pre-tokenizer Digits
  kStrippedSpace,    ///< used by the normalizer Strip, and beside added tokens
  kAddedTokenWord,   ///< beside added tokens that are a single word
};
const CodeSet& unicode_codes(CodeKind kind);

/// With what differs from its code points by case alone, one for one, as (?i:) takes them.
CodeSet with_other_cases(const CodeSet& codes);
/// The texts, and characters, that (?i:) takes for one another though they differ in length.
const std::vector<std::u32string>& long_case_folds();

/// Appends the lower case of a character.
void append_lower(char32_t code, std::string& text);

/// How many bytes of valid UTF-8 are white space (Unicode's White_Space) at its begin.
std::size_t leading_space(std::string_view text);
/// How many bytes come before that at its end.
std::size_t without_trailing_space(std::string_view text);

}  // namespace tessera::data
