#pragma once

#include <filesystem>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::checkpoint {

/// The folder of a step: `path` itself, or the newest step in it. Throws Error if there is none.
std::filesystem::path find_step(const std::filesystem::path& path);

}  // namespace tessera::checkpoint
TESSERA_API_END
