#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string_view>

namespace tessera::checkpoint {

struct JsonLimits {
  int depth = 8;                 ///< of nested objects and arrays
  std::size_t keys = 1'000'000;  ///< in the whole document
};

/// Parses a JSON object from a source that is not trusted. Throws Error for everything that RFC
/// 8259 forbids, and for what parsers disagree about: duplicate keys, NUL bytes, a byte order mark;
/// and beyond the limits.
nlohmann::json parse_strict_json(std::string_view text, const JsonLimits& limits = {});

}  // namespace tessera::checkpoint
