#pragma once

#include <cstdint>
#include <cstring>
#include <string>

namespace tessera::testing {

/// Returns the bytes of a safetensors file. `claimed`: the header length that the file states; -1
/// means the correct length.
inline std::string SafetensorsBytes(const std::string& header, const std::string& data = "",
                                    std::int64_t claimed = -1) {
  const std::uint64_t length =
      claimed >= 0 ? static_cast<std::uint64_t>(claimed) : std::uint64_t{header.size()};
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + header + data;
}

/// Returns the entry of a single tensor for the header of a safetensors file.
inline std::string Entry(const std::string& dtype, const std::string& shape,
                         const std::string& offsets, const std::string& name = "w") {
  return "\"" + name + "\":{\"dtype\":" + dtype + ",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}

}  // namespace tessera::testing
