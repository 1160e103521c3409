#include "pipeline/byte_alphabet.h"

#include <array>
#include <charconv>

#include "unicode/utf8.h"

namespace tessera::data {
namespace {

/// Printable bytes of Latin-1 stand for themselves, the others for U+0100, U+0101, ... in their
/// order.
constexpr bool stands_for_itself(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

constexpr int kNoByte = -1;
constexpr std::size_t kAlphabetEnd = 0x144;

constexpr std::array<char32_t, 256> make_code_points() {
  std::array<char32_t, 256> codes{};
  char32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    codes[static_cast<std::size_t>(byte)] =
        stands_for_itself(byte) ? static_cast<char32_t>(byte) : next++;
  }
  return codes;
}
constexpr std::array<char32_t, 256> kCodePoints = make_code_points();

constexpr std::array<int, kAlphabetEnd> make_byte_of_code_point() {
  std::array<int, kAlphabetEnd> bytes{};
  bytes.fill(kNoByte);
  for (int byte = 0; byte < 256; ++byte) {
    bytes[kCodePoints[static_cast<std::size_t>(byte)]] = byte;
  }
  return bytes;
}
constexpr std::array<int, kAlphabetEnd> kByteOfCodePoint = make_byte_of_code_point();

}  // namespace

std::optional<std::string> bytes_of_token(std::string_view token) {
  std::string bytes;
  while (!token.empty()) {
    const Utf8Step step = first_character(token);
    const char32_t code =
        step.valid ? code_point(token.substr(0, step.bytes)) : char32_t{kAlphabetEnd};
    if (code >= kAlphabetEnd || kByteOfCodePoint[code] == kNoByte) {
      return std::nullopt;
    }
    bytes.push_back(static_cast<char>(kByteOfCodePoint[code]));
    token.remove_prefix(step.bytes);
  }
  return bytes;
}

std::string token_of_bytes(std::string_view bytes) {
  std::string token;
  for (const char byte : bytes) {
    append_character(kCodePoints[static_cast<unsigned char>(byte)], token);
  }
  return token;
}

std::optional<unsigned char> byte_of_fallback_token(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || !token.ends_with('>')) {
    return std::nullopt;
  }
  unsigned char byte = 0;
  const char* end = token.data() + 5;
  const auto [stop, error] = std::from_chars(token.data() + 3, end, byte, 16);
  return error == std::errc{} && stop == end ? std::optional(byte) : std::nullopt;
}

}  // namespace tessera::data
