// The plan of a save, and the stages that immediate and background saves share.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "manifest.h"
#include "parameters.h"
#include "step_folder.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/communicator.h"
#include "tessera/export.h"

namespace tessera::checkpoint {

// The plan of a save: which rank writes which blocks, and from which memory. The plan depends only
// on the layouts: every rank computes the plan of all ranks, without communication.

/// Consecutive rows of a chunk, and where these rows are in the local tensor.
struct ChunkRows {
  std::int64_t row = 0;  ///< first row of the block within the chunk; 0 for a scalar
  std::vector<std::int64_t> local_offset;
  std::vector<std::int64_t> sizes;
};

/// A block of a state entry that one rank writes.
struct PlannedChunk {
  std::size_t entry = 0;
  int rank = 0;
  int file = 0;  ///< the index of the file among the rank's files, from 1
  std::vector<std::int64_t> offset, sizes;
  std::vector<ChunkRows> parts;  ///< consecutive parts of the block
};

struct SavePlan {
  std::vector<PlannedChunk> chunks;  ///< the chunks of all ranks, in the order of the entries
  int files = 1;                     ///< the largest number of files that a rank writes

  /// The name of the file of a chunk: "shard-00000-model-00001-of-00002.safetensors".
  std::string file_name(const PlannedChunk& chunk) const;
};

/// Makes the plan. A chunk that several ranks have is written by the rank with the fewest bytes to
/// write; a large chunk is divided among these ranks. Rank 0 writes plain tensors.
SavePlan plan_save(const std::vector<StateEntry>& entries, int world_size);

/// A hash of the folder of a step, of the names, types, sizes and chunks of a state, and of
/// `others`, further values that must be equal on all ranks. Ranks that save the same state to the
/// same place have equal hashes.
std::int64_t fingerprint(const std::filesystem::path& folder,
                         const std::vector<StateEntry>& entries, const SavePlan& plan,
                         const std::string& others);

/// Consecutive rows of a chunk, with the values of these rows.
struct RowBlock {
  std::int64_t row = 0;  ///< first row of the block within the chunk; 0 for a scalar
  at::Tensor values;
};

/// A block of a tensor in a file.
struct FileChunk {
  std::string tensor;  ///< the name under which the tensor is stored
  c10::ScalarType dtype;
  std::vector<std::int64_t> offset, sizes;
  std::vector<RowBlock> blocks;  ///< consecutive parts of the block
};

struct ShardFile {
  std::string name;
  std::vector<FileChunk> chunks;
};

/// The files that a rank writes, by name. The blocks share the memory of the state.
std::vector<ShardFile> shard_files(const SavePlan& plan, const std::vector<StateEntry>& entries,
                                   int rank);

/// Everything that a save needs. A PreparedSave refers to the memory of the blocks, not to the
/// model or the optimizer.
struct PreparedSave {
  StepFolder folder;
  int keep = 0;
  Manifest manifest;             ///< the manifest, without the sizes and checksums of files
  std::vector<ShardFile> files;  ///< the files that this rank writes
};

/// Checks and plans a save, and writes nothing. Collective over `hosts`. Throws the errors of
/// save().
PreparedSave prepare_save(comm::Communicator& hosts, const std::filesystem::path& dir,
                          std::int64_t step, const StateDict& state, const SaveOptions& options);

}  // namespace tessera::checkpoint

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Writes the files of one rank into the folder of a step. The files are durable when the function
/// returns. At most 32 MiB of a tensor are copied at once.
std::vector<FileRecord> write_shards(const std::filesystem::path& folder,
                                     const std::vector<ShardFile>& files);

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END

namespace tessera::checkpoint {

/// Writes the prepared save and commits the step. Collective over `hosts`; may run on a separate
/// thread. Throws the errors of save(), and PeerError.
void save_step(comm::Communicator& hosts, PreparedSave save);

/// Waits for the background save that uses the process group `hosts`. Throws the error of that save
/// on all ranks, unless every rank has already thrown the error. Collective over `hosts`.
void finish_pending_save(comm::Communicator& hosts);

}  // namespace tessera::checkpoint
