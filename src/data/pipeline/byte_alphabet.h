#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tessera::data {

/// The bytes that a token of GPT-2's byte-level alphabet stands for, in which each byte is written
/// as one printable character; nothing if it has another character.
std::optional<std::string> bytes_of_token(std::string_view token);

/// Bytes in that alphabet, in UTF-8.
std::string token_of_bytes(std::string_view bytes);

/// The byte of a token "<0xHH>" of a model with byte fallback.
std::optional<unsigned char> byte_of_fallback_token(std::string_view token);

}  // namespace tessera::data
