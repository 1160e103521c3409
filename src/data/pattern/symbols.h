#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "unicode/code_set.h"
#include "unicode/code_table.h"

namespace tessera::data {

/// A byte for each character of a text, such that some sets of characters are sets of bytes: an
/// ASCII character is its own, and others that are in the same of the sets share one. So an
/// expression over bytes stands for one over characters, whatever its library knows of Unicode.
class Symbols {
 public:
  /// Nothing where the sets tell more than 128 kinds of characters apart that are not ASCII.
  static std::optional<Symbols> telling_apart(const std::vector<CodeSet>& sets);

  /// The bytes of a set of those, in the order of their values.
  const std::vector<unsigned char>& bytes_of(std::size_t set) const { return bytes_of_[set]; }
  /// Converts valid UTF-8: a byte for each character.
  std::string of(std::string_view text) const;

 private:
  using Bytes = std::vector<unsigned char>;

  Symbols(const Bytes& symbols, std::vector<Bytes> bytes_of)
      : symbols_(symbols), bytes_of_(std::move(bytes_of)) {}

  CodeTable<unsigned char> symbols_;
  std::vector<Bytes> bytes_of_;
};

}  // namespace tessera::data
