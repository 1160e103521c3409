// The blocks of memory that one rank writes: of the state itself, or of a copy on the host that a
// save in the background writes while the state changes.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "save/save_plan.h"

namespace tessera::checkpoint {

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

/// Replaces the blocks by copies on the host; those of a GPU by copies in page-locked memory.
/// Returns when the state may change.
void copy_to_host(std::vector<ShardFile>& files);

}  // namespace tessera::checkpoint
