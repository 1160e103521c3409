#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "tessera/core/text.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Parses a JSON object from an untrusted file. Throws Error as check_strict_json() does.
nlohmann::json parse_strict_json(std::string_view text, const JsonLimits& limits = {});

}  // namespace tessera::detail
TESSERA_API_END
