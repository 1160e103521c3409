#pragma once

#include <filesystem>
#include <vector>

#include "save/shard_files.h"
#include "step/manifest.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Writes the files of one rank into a step's folder, durable when this returns. At most 32 MiB of
/// a tensor are copied at once.
std::vector<FileRecord> write_shards(const std::filesystem::path& folder,
                                     const std::vector<ShardFile>& files);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
