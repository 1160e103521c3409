#pragma once

#include <filesystem>
#include <string>

#include "step/manifest.h"
#include "tessera/checkpoint/safetensors.h"

namespace tessera::checkpoint {

/// Throws Error for a file that is missing or of another size, and for a header that differs from
/// the one written.
SafetensorsFile open_file_of_step(const std::filesystem::path& folder, const FileRecord& record);

/// Throws Error unless a file has a chunk of a tensor as the manifest says.
void check_entry(const SafetensorsFile& file, const std::string& name, const ManifestTensor& tensor,
                 const ManifestChunk& chunk);

}  // namespace tessera::checkpoint
