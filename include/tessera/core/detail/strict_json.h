#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string_view>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Bounds on what a document may cost while it is parsed. The defaults fit an index of weights.
struct JsonLimits {
  int depth = 8;                    ///< of nested objects and arrays
  std::size_t keys = 1'000'000;     ///< in the whole document
  std::size_t values = 10'000'000;  ///< numbers, lists, objects, ... in the whole one
};

/// Parses a JSON object of a file that a stranger may have made. Throws Error for everything that
/// RFC 8259 forbids, and for what parsers disagree about: duplicate keys, NUL bytes, a byte order
/// mark; and beyond the limits.
nlohmann::json parse_strict_json(std::string_view text, const JsonLimits& limits = {});

}  // namespace tessera::detail
TESSERA_API_END
