// The stages of a checkpoint save that immediate and background saves share.

#pragma once

#include "manifest.h"
#include "step_folder.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/communicator.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Consecutive rows of a stored block (chunk), with the values of these rows.
struct RowBlock {
  std::int64_t row = 0;  ///< index of the first row in the stored block; 0 for a scalar
  at::Tensor values;
};

struct FileChunk {
  std::string tensor;
  c10::ScalarType dtype;
  std::vector<std::int64_t> offset, sizes;
  std::vector<RowBlock> blocks;  ///< consecutive ranges of rows of the block
};

struct ShardFile {
  std::string name;
  std::vector<FileChunk> chunks;
};

/// Everything that a checkpoint save needs. A PreparedSave refers to the memory of the tensors
/// (FileChunk::blocks), not to the model or the optimizer.
struct PreparedSave {
  StepFolder folder;
  int keep = 0;
  Manifest manifest;             ///< the step's manifest, without sizes and checksums of files
  std::vector<ShardFile> files;  ///< the files that this rank writes
};

/// Checks and plans a save, and writes nothing. Collective over the CPU process group `hosts`.
/// Throws the errors of save().
PreparedSave prepare_save(comm::Communicator& hosts, const std::filesystem::path& dir,
                          std::int64_t step, const StateDict& state, const SaveOptions& options);

/// Writes the files of one rank into the folder of a saved step, durably. Copies at most 32 MiB of
/// a tensor at once.
std::vector<FileRecord> write_shards(const std::filesystem::path& folder,
                                     const std::vector<ShardFile>& files);

/// Writes the prepared save and commits the step. Collective over `hosts`; can run on a separate
/// thread. Throws the errors of save(), and PeerError.
void save_step(comm::Communicator& hosts, PreparedSave save);

/// Waits for the background save that uses the process group `hosts`. Throws the save's error on
/// all ranks, unless every rank has already thrown the error. Collective over `hosts`.
void finish_pending_save(comm::Communicator& hosts);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
