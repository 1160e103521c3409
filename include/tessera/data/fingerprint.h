#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// What tells a file from others without reading all of it.
struct FileFingerprint {
  std::string name;  ///< without its folder, since data may move
  std::uint64_t bytes = 0;
  /// CRC-32C of up to 64 pieces of 4 KiB, spread evenly from the first byte to the last.
  std::uint32_t sum = 0;
  friend bool operator==(const FileFingerprint&, const FileFingerprint&) = default;
};

/// Throws Error if the file can't be read.
FileFingerprint fingerprint(const std::string& path);
/// Those of several files.
std::vector<FileFingerprint> fingerprints(const std::vector<std::string>& files);

}  // namespace tessera::data
TESSERA_API_END
