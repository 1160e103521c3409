// Texts of users and files: strict JSON, and the nearest known name.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Bounds on what a document may cost while it is parsed. The defaults fit an index of weights.
struct JsonLimits {
  int depth = 8;                    ///< of nested objects and arrays
  std::size_t keys = 1'000'000;     ///< in the whole document
  std::size_t values = 10'000'000;  ///< numbers, lists, objects, ... in the whole one
};

/// Throws Error unless `text` is a JSON object that every parser reads alike, for untrusted files:
/// for everything that RFC 8259 forbids, and for what parsers disagree about: duplicate keys, NUL
/// bytes, a byte order mark; and beyond the limits. A text that passes may be given to any parser.
void check_strict_json(std::string_view text, const JsonLimits& limits = {});

/// The candidate with the fewest edits (Levenshtein distance) from `word`, for a message about a
/// name that is not known. Of several equally near the first one; "" only where there are none.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace tessera
TESSERA_API_END
