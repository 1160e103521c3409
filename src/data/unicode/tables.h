#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

namespace tessera::data {

/// A set of code points: those that are in an odd number of its bases and its own ranges. Its
/// edges, where a range begins or the code point behind one, are `count` of UnicodeTables::edges,
/// behind those of the entries before it.
struct PropertyEntry {
  std::string_view names;  ///< joined by |
  std::uint32_t bases;     ///< bit i: the set of entry i, which has no bases
  std::uint32_t count;
};

/// Written and described by make_tables.py. Keys are sorted, and written as differences. A mapping
/// has rows of code, count, length, texts, of code points in a row; and for runs of code, count, 0,
/// stride, character: each code point, by the stride, becomes one that is as far from the character
/// as it is from the first.
struct UnicodeTables {
  std::span<const std::uint32_t> edges;  ///< as differences in each entry
  std::span<const PropertyEntry> properties;
  std::span<const std::uint32_t> compositions;  ///< code, the first and second it is composed of
  std::span<const std::uint32_t> canonical;     ///< mapping of other canonical decompositions
  std::span<const std::uint32_t> compatible;    ///< mapping of those that differ from canonical
  std::span<const std::uint32_t> classes;       ///< code, count, the combining class of each
  std::span<const std::uint32_t> lower;         ///< mapping to lower case
  std::span<const std::uint32_t> folds;         ///< mapping to the first that differs by case alone
  std::span<const std::uint32_t> long_folds;    ///< length, text; no keys
};
extern const UnicodeTables kUnicode;

/// What a mapping says of each code point, in the order of its rows.
void for_each_mapped(
    std::span<const std::uint32_t> mapping,
    const std::function<void(char32_t code, std::span<const std::uint32_t> text)>& visit);

}  // namespace tessera::data
