#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "save/shard_files.h"
#include "step/manifest.h"
#include "step/step_folder.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// Everything that a save needs; of the model and optimizer only the memory of the blocks.
struct PreparedSave {
  StepFolder folder;
  int keep = 0;
  Manifest manifest;             ///< without the sizes and checksums of the files
  std::vector<ShardFile> files;  ///< of this rank
};

/// Checks and plans a save. Writes nothing. Collective over `hosts`. Throws Error as save() does.
PreparedSave prepare_save(comm::Communicator& hosts, const std::filesystem::path& dir,
                          std::int64_t step, const StateDict& state, const SaveOptions& options);

}  // namespace tessera::checkpoint
