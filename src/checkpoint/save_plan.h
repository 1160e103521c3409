// Plans which rank writes which blocks, and from which memory. The plan is a pure function of the
// layouts: every rank computes it for all ranks, without communication.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "parameters.h"

namespace tessera::checkpoint {

/// Rows of a chunk, and their place in the local tensor.
struct ChunkRows {
  std::int64_t row = 0;  ///< the first row within the chunk; 0 for a scalar
  std::vector<std::int64_t> local_offset;
  std::vector<std::int64_t> sizes;
};

/// A block of an entry that one rank writes.
struct PlannedChunk {
  std::size_t entry = 0;
  int rank = 0;
  int file = 0;  ///< index among the rank's files, from 1
  std::vector<std::int64_t> offset, sizes;
  std::vector<ChunkRows> parts;  ///< consecutive parts of the block
};

struct SavePlan {
  std::vector<PlannedChunk> chunks;  ///< all ranks' chunks, in the order of the entries
  int files = 1;                     ///< the maximum number of files of a rank

  /// The name of a chunk's file: "shard-00000-model-00001-of-00002.safetensors".
  std::string file_name(const PlannedChunk& chunk) const;
};

/// A chunk that several ranks have is written by the rank with the fewest bytes to write; a large
/// chunk is divided among them. Rank 0 writes plain tensors.
SavePlan plan_save(const std::vector<StateEntry>& entries, int world_size);

/// A hash of the step's folder, of the names, types, sizes and chunks of a state, and of `others`,
/// further values that must agree. It is equal on ranks that save the same state to the same place.
std::int64_t fingerprint(const std::filesystem::path& folder,
                         const std::vector<StateEntry>& entries, const SavePlan& plan,
                         const std::string& others);

/// Rows of a chunk, with their values.
struct RowBlock {
  std::int64_t row = 0;  ///< the first row within the chunk; 0 for a scalar
  at::Tensor values;
};

/// A block of a tensor in a file.
struct FileChunk {
  std::string tensor;  ///< the tensor's stored name
  c10::ScalarType dtype;
  std::vector<std::int64_t> offset, sizes;
  std::vector<RowBlock> blocks;  ///< consecutive parts of the block
};

struct ShardFile {
  std::string name;
  std::vector<FileChunk> chunks;
};

/// The files of a rank, by name. The blocks share the memory of the state.
std::vector<ShardFile> shard_files(const SavePlan& plan, const std::vector<StateEntry>& entries,
                                   int rank);

}  // namespace tessera::checkpoint
