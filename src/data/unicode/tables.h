#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace tessera::data {

/// A set of code points: `count` pairs from kRanges[begin] on. A pair is the number of code points
/// between the last range and this one, and the number in this one.
struct PropertyEntry {
  std::string_view names;  ///< joined by |
  std::uint32_t begin;
  std::uint32_t count;
};

/// Written and described by make_tables.py. Keys are sorted, and written as differences.
struct UnicodeTables {
  std::span<const std::uint32_t> ranges;
  std::span<const PropertyEntry> properties;
  std::span<const std::uint32_t> canonical;       ///< code, length, what it is decomposed to
  std::span<const std::uint32_t> compatible;      ///< the same, of those that differ
  std::span<const std::uint32_t> compositions;    ///< first, second, what they are composed to
  std::span<const std::uint32_t> classes;         ///< code, combining class
  std::span<const std::uint32_t> lower;           ///< code, length, its lower case
  std::span<const std::uint32_t> folds;           ///< length, code points; no keys
  std::span<const std::uint32_t> multiple_folds;  ///< length, text; no keys
};
extern const UnicodeTables kUnicode;

}  // namespace tessera::data
