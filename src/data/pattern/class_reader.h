#pragma once

#include <string_view>

#include "unicode/code_set.h"

namespace tessera::data {

/// Reads the sets of characters in an expression of Oniguruma, from left to right. All calls throw
/// Error, with the construct, for what is not implemented.
class ClassReader {
 public:
  explicit ClassReader(std::string_view expression) : whole_(expression), rest_(expression) {}

  std::string_view rest() const { return rest_; }
  void skip(std::size_t bytes) { rest_.remove_prefix(bytes); }

  /// A character, which is not empty UTF-8.
  char32_t take_character();
  /// Reads after "\": a character, or a set of them.
  CodeSet take_escape(bool in_class);
  /// Reads after "[". `fold`: within (?i:).
  CodeSet take_class(bool fold);

  void refuse_if(bool condition, std::string_view construct) const;

 private:
  struct Item;

  CodeSet take_items();
  Item take_item();
  CodeSet take_posix();
  CodeSet take_property();
  char32_t take_number();
  std::string_view take_until(char end, std::size_t begin);

  std::string_view whole_;
  std::string_view rest_;
  int depth_ = 0;
};

}  // namespace tessera::data
