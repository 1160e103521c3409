// Which rank writes what, and the memory that it writes. A pure function of the layouts, which
// every rank computes for all ranks: a save gathers nothing to be planned.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "parameters.h"

namespace tessera::checkpoint {

/// Rows of a chunk, and where they are in the local tensor.
struct ChunkRows {
  std::int64_t row = 0;  ///< the first one, in the chunk; 0 for a scalar
  std::vector<std::int64_t> local_offset;
  std::vector<std::int64_t> sizes;
};

/// A block of an entry that one rank writes.
struct PlannedChunk {
  std::size_t entry = 0;
  int rank = 0;
  int file = 0;  ///< its number among the rank's files, from 1
  std::vector<std::int64_t> offset, sizes;
  std::vector<ChunkRows> parts;  ///< one after another
};

struct SavePlan {
  std::vector<PlannedChunk> chunks;  ///< in the order of the entries
  int files = 1;                     ///< that a rank has at most

  /// "shard-00000-model-00001-of-00002.safetensors".
  std::string file_name(const PlannedChunk& chunk) const;
};

/// A chunk that several ranks of a mesh hold is written by the one with the least to write; large
/// ones are divided among them. Rank 0 writes the tensors that are on no mesh.
SavePlan plan_save(const std::vector<StateEntry>& entries, int world_size);

/// A hash of a step's folder, the names, types, sizes and chunks of a state, and `others`, further
/// values that must agree: equal on ranks that save the same to the same place.
std::int64_t fingerprint(const std::filesystem::path& folder,
                         const std::vector<StateEntry>& entries, const SavePlan& plan,
                         const std::string& others);

/// Rows of a chunk.
struct RowBlock {
  std::int64_t row = 0;  ///< the first one, in the chunk; 0 for a scalar
  at::Tensor values;
};

/// A block of a tensor, in a file.
struct FileChunk {
  std::string tensor;  ///< its stored name
  c10::ScalarType dtype;
  std::vector<std::int64_t> offset, sizes;
  std::vector<RowBlock> blocks;  ///< one after another
};

struct ShardFile {
  std::string name;
  std::vector<FileChunk> chunks;
};

/// The files of a rank, by name. The blocks share the memory of the state.
std::vector<ShardFile> shard_files(const SavePlan& plan, const std::vector<StateEntry>& entries,
                                   int rank);

}  // namespace tessera::checkpoint
