#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string_view>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// Limits on the cost of parsing a JSON document. The default limits are high enough for a
/// model.safetensors.index.json.
struct JsonLimits {
  int depth = 8;                 ///< maximum number of levels of nested objects and arrays
  std::size_t keys = 1'000'000;  ///< maximum number of keys in the whole document
  /// Maximum number of numbers, strings, lists and objects in the whole document.
  std::size_t values = 10'000'000;
};

}  // namespace tessera

namespace tessera::detail {

/// Like check_strict_json() of files.h, but with the given limits.
void check_strict_json(std::string_view text, const JsonLimits& limits);

/// Parses a JSON object from an untrusted file. Throws Error for a text that check_strict_json()
/// rejects.
nlohmann::json parse_strict_json(std::string_view text, const JsonLimits& limits = {});

}  // namespace tessera::detail
TESSERA_API_END
