#pragma once

#include <string>

#include "tessera/data/text.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// Reads a file's fingerprint. Throws Error if the file cannot be read.
FileFingerprint fingerprint(const std::string& path);

}  // namespace tessera::data
TESSERA_API_END
