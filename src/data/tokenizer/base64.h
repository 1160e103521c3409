#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tessera::data {

/// The bytes of a text in base64 (RFC 4648, with padding); nothing if it is not.
std::optional<std::string> decode_base64(std::string_view text);

}  // namespace tessera::data
