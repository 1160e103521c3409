// The stages of a save, shared by immediate and background saves.

#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "manifest.h"
#include "save_plan.h"
#include "step_folder.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/communicator.h"
#include "tessera/export.h"

namespace tessera::checkpoint {

/// Everything that a save needs. It refers to the blocks' memory, not to the model or the
/// optimizer.
struct PreparedSave {
  StepFolder folder;
  int keep = 0;
  Manifest manifest;             ///< the manifest, without the sizes and checksums of files
  std::vector<ShardFile> files;  ///< the files that this rank writes
};

/// Checks and plans a save, and writes nothing. Collective over `hosts`. Throws Error as save()
/// does.
PreparedSave prepare_save(comm::Communicator& hosts, const std::filesystem::path& dir,
                          std::int64_t step, const StateDict& state, const SaveOptions& options);

}  // namespace tessera::checkpoint

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Writes one rank's files into a step's folder; they are durable on return. At most 32 MiB of a
/// tensor are copied at once.
std::vector<FileRecord> write_shards(const std::filesystem::path& folder,
                                     const std::vector<ShardFile>& files);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END

namespace tessera::checkpoint {

/// Writes the prepared save and commits it. Collective over `hosts`; may run on a separate thread.
/// Throws Error as save() does, and PeerError.
void save_step(comm::Communicator& hosts, PreparedSave save);

/// Waits for the background save that uses this process group. Throws its error on all ranks,
/// unless every rank has already thrown it. Collective over `hosts`.
void finish_pending_save(comm::Communicator& hosts);

}  // namespace tessera::checkpoint
