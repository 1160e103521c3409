#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// The value of a JSON field: a string or a list of strings.
struct JsonTexts {
  std::vector<std::string> texts;
  bool is_list = false;
};

/// A fingerprint: identifies a file by name, size and checksum, without reading the whole file.
struct FileFingerprint {
  std::string name;  ///< the file's name without its folder, because the folder can be moved
  std::uint64_t bytes = 0;
  /// CRC-32C of up to 64 blocks of 4 KiB, which are spread evenly over the file.
  std::uint32_t sum = 0;
};

}  // namespace tessera::data
TESSERA_API_END
