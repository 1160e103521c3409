#pragma once

#include <string>
#include <string_view>

#include "pattern/pattern.h"
#include "pipeline/json_field.h"

namespace tessera::data {

/// The pattern of a component: {"String": text} or {"Regex": expression}.
Pattern read_pattern(const JsonField& field);
/// Text of one character. Throws Error for another.
const std::string& read_character(const JsonField& field);

/// Throws Error if a text of `from` bytes becomes longer than any tokenizer makes it.
void check_growth(std::size_t from, std::size_t to);

/// Text in place of each match of a pattern.
class Replacement {
 public:
  /// `component`: has the keys "pattern" and "content".
  explicit Replacement(const JsonField& component);

  /// A copy of valid UTF-8 with the matches replaced. Throws Error beyond check_growth().
  std::string in(std::string_view text) const;

 private:
  Pattern pattern_;
  std::string content_;
};

}  // namespace tessera::data
