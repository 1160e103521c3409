// Checks of texts from users and files: strict JSON, and the nearest known name.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Limits on the cost of parsing a JSON document. The defaults allow an index of model weights.
struct JsonLimits {
  int depth = 8;                    ///< of nesting objects and arrays
  std::size_t keys = 1'000'000;     ///< in the whole document
  std::size_t values = 10'000'000;  ///< numbers, lists, objects, ... in the whole document
};

/// Throws Error unless `text` is a JSON object that every parser reads in the same way; for
/// untrusted files. Rejects everything that RFC 8259 forbids, what parsers disagree about
/// (duplicate keys, NUL bytes, a byte order mark), and documents beyond the limits. A text that
/// passes may be given to any parser.
void check_strict_json(std::string_view text, const JsonLimits& limits = {});

/// The candidate with the smallest Levenshtein distance from `word`, for a message about an unknown
/// name. Of several equally near candidates, the first; "" only if there are no candidates.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace tessera
TESSERA_API_END
